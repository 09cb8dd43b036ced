"""How a model is trained, as a value: what the optimiser, the losses and the phases are told."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of training with one shape of batch.

    Attributes:
        until: share of all steps at which it ends.
        length: tokens of a sequence.
        batch: sequences of a step.
        dense: whether sparse layers attend to everything.
        indexer_weight: weight of the indexers' imitation loss, dense or not.
    """

    until: float
    length: int
    batch: int
    dense: bool = False
    indexer_weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run but the model and the text.

    Attributes:
        phases: in order; the last one ends at 1.
        learning_rate: at the top of the schedule.
        warmup: share of the steps until there.
        final_rate: share of the learning rate at the end of the cosine.
        betas: of AdamW.
        weight_decay: of matrices; embeddings, norms, taps and decays have none.
        clip: largest norm of the gradient.
        table_rate: multiple of the learning rate for the n-gram table, whose rows are rarely hit.
        drafts: chained draft steps.
        draft_weight: weight of their mean loss.
        draft_imitation: share of that loss that is the divergence from the main model's own
            distribution; the rest is the loss of the true token.
        balance_weight: weight of the router's balance loss.
        seed: of the weights and of the order of the text.
    """

    phases: tuple[Phase, ...]
    learning_rate: float = 3e-3
    warmup: float = 0.03
    final_rate: float = 0.03
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    table_rate: float = 2.0
    drafts: int = 3
    draft_weight: float = 0.3
    draft_imitation: float = 0.5
    balance_weight: float = 0.01
    seed: int = 0

    def phase_of(self, step: int, steps: int) -> int:
        """Number of the phase that step `step` (from 0) of `steps` belongs to."""
        for number, phase in enumerate(self.phases):
            if step < round(phase.until * steps):
                return number
        return len(self.phases) - 1

    def first_step(self, phase: int, steps: int) -> int:
        """The step at which a phase begins."""
        return round(self.phases[phase - 1].until * steps) if phase else 0
