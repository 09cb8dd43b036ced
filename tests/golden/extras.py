"""Reference outputs beside those of make_golden.py, from the same Hugging Face implementation.

Needs: torch, transformers>=5.17, safetensors, and the folder of make_golden.py on PYTHONPATH.
Usage: python extras.py mrope OUT             three-axis positions -> OUT/mrope.safetensors
       python extras.py mtp_fp8 OUT TARGET    draft head with FP8 experts -> TARGET/
OUT is an untrimmed folder of make_golden.py.

mrope.safetensors: `ids` [S], `positions` [S,3] (temporal, height, width), `logits` [S,V].
TARGET holds model-mtp.safetensors, to stand in place of the one in OUT/checkpoint (experts one by
one in e4m3 with block scales, all else as it was), and io.safetensors with `p{i}.mtp.logits` of
float32 arithmetic on exactly those values.
"""

import json
import sys
from pathlib import Path

import make_golden as golden
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp import modeling_qwen4_exp as hf

# text, an image of 3 x 4 patches at one time, text after it, a second image of 2 x 2, text
GRIDS = ((5, 3, 4), (3, 2, 2))
LENGTH = 24


def three_axis_positions() -> torch.Tensor:
    rows, start = [], 0
    for text, height, width in GRIDS:
        rows += [[start + i] * 3 for i in range(text)]
        start += text
        rows += [[start, start + h, start + w] for h in range(height) for w in range(width)]
        start += max(height, width)
    rows += [[start + i] * 3 for i in range(LENGTH - len(rows))]
    return torch.tensor(rows[:LENGTH])


def configuration(out: Path) -> Qwen4ExpTextConfig:
    config = Qwen4ExpTextConfig(**json.loads((out / "case.json").read_text())["config"])
    config._attn_implementation = "eager"
    return config


def mrope(out: Path) -> None:
    config = configuration(out)
    model = hf.Qwen4ExpForCausalLM.from_pretrained(
        out / "checkpoint", config=config, dtype=torch.float32
    ).eval()
    io = load_file(out / "io.safetensors")
    again = model(input_ids=io["p0.ids"][None], use_cache=False).logits[0]
    assert torch.allclose(again, io["p0.logits"], atol=1e-5), "another model was loaded"
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, config.vocab_size, (LENGTH,), generator=generator)
    positions = three_axis_positions()
    logits = model(
        input_ids=ids[None], position_ids=positions.T[:, None].contiguous(), use_cache=False
    ).logits[0]
    text = model(input_ids=ids[None], use_cache=False).logits[0]
    print("largest difference to text positions", float((logits - text).abs().max()))
    save_file(
        {"ids": ids, "positions": positions, "logits": logits.contiguous()},
        out / "mrope.safetensors",
    )


def mtp_fp8(out: Path, target: Path) -> None:
    config = configuration(out)
    checkpoint = out / "checkpoint"
    disk = load_file(checkpoint / "model-mtp.safetensors")
    head = golden.MTP(config).eval()
    head.load_state_dict({k.removeprefix("mtp."): v.float() for k, v in disk.items()})
    experts = head.layers[0].mlp.experts
    stacked = [name for name in disk if ".mlp.experts." in name]
    disk = {name: value for name, value in disk.items() if name not in stacked}
    for e in range(experts.num_experts):
        gate, up = experts.gate_up_proj[e].chunk(2, 0)
        parts = (("gate_proj", gate), ("up_proj", up), ("down_proj", experts.down_proj[e]))
        for name, values in parts:
            stored, exact = golden.quantise_fp8(values.clone())
            values.copy_(exact)
            for kind, tensor in stored.items():
                disk[f"mtp.layers.0.mlp.experts.{e}.{name}.{kind}"] = tensor.contiguous()
    target.mkdir(parents=True, exist_ok=True)
    save_file(disk, target / "model-mtp.safetensors", metadata={"format": "pt"})

    main = {}
    for file in checkpoint.glob("model-0*.safetensors"):
        main.update(load_file(file))
    embed, output = (main[n].float() for n in ("model.embed_tokens.weight", "lm_head.weight"))
    rotary = hf.Qwen4ExpTextRotaryEmbedding(config)
    io = load_file(out / "io.safetensors")
    results = {}
    for name in [n for n in io if n.endswith(".ids") and n != "batch.ids"]:
        prompt, ids = name.partition(".")[0], io[name]
        residual = io[f"{prompt}.residual.{config.num_hidden_layers - 1}"][:-1]
        embedded = embed[ids[1:]][None]
        places = torch.arange(len(ids) - 1).view(1, 1, -1).expand(3, 1, -1)
        mask = golden.causal(len(ids) - 1)
        _, mixed = head(embedded, residual[None], rotary(embedded, places), mask)
        results[f"{prompt}.mtp.logits"] = (mixed[0] @ output.T).contiguous()
        change = (results[f"{prompt}.mtp.logits"] - io[f"{prompt}.mtp.logits"]).abs().max()
        print(prompt, "largest difference to the bf16 experts", float(change))
    save_file(results, target / "io.safetensors")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    what, *folders = sys.argv[1:]
    {"mrope": mrope, "mtp_fp8": mtp_fp8}[what](*map(Path, folders))
