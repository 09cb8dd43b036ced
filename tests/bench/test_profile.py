"""Which scope a kernel's time counts for, from the text of a compiled program."""

from bench.profile import op_names, time_by_part

HLO = """\
%fused (p: f32[4]) -> f32[4] {
  ROOT %multiply.1 = f32[4]{0} multiply(%p, %p), metadata={op_name="jit(r)/verify/layer1.moe/mul"}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %loop_fusion.2 = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused
  %triton_kernel.1 = f32[4]{0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(r)/draft_1/router/triton_kernel"}, backend_config={name = "route_4"}
  %triton_kernel.2 = f32[4]{0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(r)/verify/router/triton_kernel"}, backend_config={name = "route_4"}
  %mpmd_map.1 = f32[4]{0} custom-call(%x), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(r)/draft_1/experts/jit(parts_of)/experts_bf16_40x2560/mpmd_map"}
}
"""


def test_kernels_have_the_scopes_of_what_launches_them():
    found = op_names(HLO)
    assert found["loop_fusion_2"] == ["jit(r)/verify/layer1.moe/mul"]
    assert found["route_4"] == [
        "jit(r)/draft_1/router/triton_kernel",
        "jit(r)/verify/router/triton_kernel",
    ]
    mosaic = "jit(r)/draft_1/experts/jit(parts_of)/experts_bf16_40x2560/mpmd_map"
    assert found["experts_bf16_40x2560_mosaic_gpu_kernel"] == [mosaic]


def test_calls_of_one_kernel_share_its_time():
    events = [(("route_4",), 4000.0), (("experts_bf16_40x2560_mosaic_gpu_kernel",), 10_000.0)]
    parts, kernels = time_by_part(events, op_names(HLO), rounds=2)
    assert parts == {
        ("draft dense", "draft"): 1.0,
        ("router", "verify"): 1.0,
        ("draft experts", "draft"): 5.0,
    }
    assert kernels == 1
