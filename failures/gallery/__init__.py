"""Failures of low-precision programs in a few lines, and of models as people write them.

The lines at fault are marked ``# <- here``. The arguments of ``attention.padded_encoder`` are made
by ``attention.padded_encoder_arguments``: `scalewise audit
failures/gallery/attention.py:padded_encoder --format fp16 --args padded_encoder_arguments`.
``padded_encoder_fixed`` is the program as an expert would fix it.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import scalewise as sw

from ..programs import Program, register
from . import accumulators, attention, losses, numerics, optimizers, positions, recipes, short

# Descriptions of fixes, as regular expressions; upper and lower case are the same.
LINES = r"^(float32|float64|FP32|FP64) (for|in) (?!.*\b(all of|throughout|program)\b)"
LOSS_SCALE = r"loss scale"
SCALED = r"scale (its|the) result|scaled? by 2\^|l2_norm|hypot|BF16 for th(is|e)"
OPTIMIZER = r"float32 for (the optimizer|.*update)"


def failure(call: Callable, low: Any, kinds: str, *fixes: str, **fields: Any) -> Program:
    """Returns a failure, with the arguments that its module defines."""
    args = getattr(sys.modules[call.__module__], f"{call.__name__}_arguments")
    fields = {"reference": "float32", "fixes": fixes} | fields
    return Program(call, args, low, tuple(kinds.split()), **fields)


FAILURES: dict[str, Program] = {
    # -- attention
    "An empty sequence in a padded batch": failure(
        attention.padded_encoder, "fp16", "overflow nan",
        r"in place of -1e\+0?9",
        source="transformers PR #17306, flax PR #1527",
    ),
    "Two masks of an empty prompt": failure(
        attention.guided_decoder, "fp16", "overflow nan",
        r"in place of -(65504|6\.55)", LINES,
        inside=(attention.two_masks,),
        source="NeMo Automodel PR #2658",
    ),
    "Rotary angles in BF16": failure(
        attention.rotary_decoder, "bf16", "amplified precision",
        LINES, r"all of rotary_angles",
        inside=(attention.rotary_angles,),
        source="transformers PR #29285, vllm #863",
    ),
    # -- positions, indices, routes
    "Time steps of a diffusion model": failure(
        positions.denoiser, "bf16", "amplified precision",
        LINES, r"all of timestep_embedding",
        inside=(positions.timestep_embedding,),
        source="diffusers: UNet2DConditionModel computes its time embedding in float32",
    ),
    "Positions counted in BF16": failure(
        positions.counted_positions, "bf16", "decision precision", LINES,
        source="EleutherAI/gpt-neox PR #1016",
    ),
    "A router's second best expert": failure(
        positions.mixture, "bf16", "decision amplified precision", LINES,
        source="arXiv 2101.03961, section 2.4: selective precision",
    ),
    "A quantiser's codes": failure(
        positions.quantiser, "bf16", "decision precision amplified", LINES,
    ),
    "Distances of positions beyond 2048": failure(
        positions.linear_biases, "fp16", "amplified precision", LINES,
        source="arXiv 2108.12409: ALiBi",
    ),
    "Sampling at a low temperature": failure(
        positions.sampler, "bf16", "decision amplified precision", LINES,
    ),
    # -- training steps
    "apply_if_finite skips every step": failure(
        optimizers.cautious_step, "fp16", "overflow decision", LOSS_SCALE, LINES, SCALED,
        inside=(optimizers.raw_features,),
        source="optax.apply_if_finite",
    ),
    "A static loss scale of 65536": failure(
        optimizers.statically_scaled_step, "fp16", "overflow nan decision",
        r"in place of 65536|in place of 6\.55", LOSS_SCALE,
        source="torch.amp.GradScaler starts at 65536",
    ),
    "A gradient norm decides to skip": failure(
        optimizers.clipped_or_skipped_step, "fp16", "overflow decision", LINES, SCALED,
        inside=(optimizers.global_norm,),
        source="fairscale PR #263",
    ),
    "Adam's epsilon behind clipping": failure(
        optimizers.language_model_step, "fp16", "underflow nan",
        r"in place of 1e-0?8", OPTIMIZER,
        source="optax #1754, keras #11860",
        share=0.6,
    ),
    "Adam's bias correction": failure(
        optimizers.adam_step, "bf16", "precision overflow nan cancellation amplified swamping",
        r"0\.999 (kept )?in float32", OPTIMIZER, LINES,
        source="tt-metal #55935",
        share=0.6,
    ),
    "Updates and their average vanish": failure(
        optimizers.averaged_training, "bf16", "swamping precision", LINES, r"0\.9999 kept",
        source="torchtune #2254, arXiv 1710.03740",
        faults=2,
    ),
    "Gradients of many micro-batches": failure(
        optimizers.accumulated_gradients, "bf16", "swamping", LINES,
        source="ml_dtypes #63",
    ),
    "Stochastic rounding behind a rounded sum": failure(
        optimizers.stochastic_update, "bf16", "swamping decision", LINES,
        source="pytorch/ao PR #1124",
    ),
    # -- norms and losses
    "LayerNorm of outliers": failure(
        losses.outlier_features, "fp16", "overflow", LINES, SCALED, r"all of large_layer_norm",
        inside=(losses.large_layer_norm,),
        source="pytorch #66707, onnxruntime PR #29045",
    ),
    "GroupNorm's one-pass variance": failure(
        losses.bright_images, "bf16", "cancellation amplified",
        LINES, r"two.pass|mean of squared deviations", r"all of one_pass_moments",
        inside=(losses.one_pass_moments,),
        source="pytorch #66707; use_fast_variance in flax",
    ),
    "RMSNorm's epsilon and rows of zeros": failure(
        losses.padded_tokens, "fp16", "underflow nan overflow", r"in place of 1e-12", LINES,
        inside=(losses.rms_norm,),
        source="tensorflow PR #24979",
    ),
    "A divergence with epsilons": failure(
        losses.distillation, "fp16", "underflow nan overflow",
        r"log_softmax", LINES, r"all of divergence",
        inside=(losses.divergence,),
    ),
    "A focal loss with epsilons": failure(
        losses.detector, "fp16", "underflow nan overflow cancellation amplified",
        r"log_sigmoid|softplus", LINES, r"all of focal",
        inside=(losses.focal,),
        source="arXiv 1708.02002; torchvision computes it from logits",
    ),
    "A contrastive loss without logsumexp": failure(
        losses.contrastive, "fp16", "overflow", r"logsumexp", LINES, SCALED,
        inside=(losses.normaliser,),
        source="arXiv 2002.05709",
    ),
    "Logarithms of smoothed targets": failure(
        losses.smoothed_classifier, "fp16", "underflow", r"log_softmax", LINES,
        inside=(losses.smoothed_cross_entropy,),
        source="optax #1020",
    ),
    "A penalty on a flat critic": failure(
        losses.gradient_penalty, "fp16", "underflow nan overflow", LINES, SCALED,
        inside=(losses.penalty,),
        source="arXiv 1704.00028",
    ),
    "A divergence near the prior": failure(
        losses.collapsed_autoencoder, "bf16", "cancellation amplified swamping", LINES, r"expm1",
        inside=(losses.prior_divergence,),
        source="arXiv 1312.6114",
    ),
    "Softplus by hand": failure(
        losses.uncertain_regression, "fp16", "overflow", r"softplus|logaddexp|log1p", LINES, SCALED,
        inside=(losses.softplus,),
    ),
    # -- simulations and statistics
    "log(1 - p) of rare events": failure(
        numerics.rare_failures, "float32", "cancellation amplified swamping precision",
        r"log1p", r"log_sigmoid", LINES,
        inside=(numerics.survival,),
        reference="float64", options={"reference": "float64"},
    ),
    "Edges of a 10-bit image": failure(
        numerics.edge_detector, "fp16", "overflow", LINES, SCALED,
        inside=(numerics.edges,),
    ),
    "Rays from just above the ground": failure(
        numerics.lit_ground, "float32", "cancellation amplified", LINES, r"all of distance_to",
        inside=(numerics.distance_to_ground,),
        reference="float64", options={"reference": "float64"},
        source="Ray Tracing Gems, chapter 7",
    ),
    "Orbits with small steps": failure(
        numerics.orbits, "bf16", "swamping", LINES, r"all of step",
    ),
    "A noise schedule's first levels": failure(
        numerics.noisy_samples, "bf16", "swamping precision cancellation amplified",
        LINES, r"all of noise_levels",
        inside=(numerics.noise_levels,),
    ),
    "The mean of a large image": failure(
        numerics.pooled_features, "fp16", "overflow", LINES, SCALED,
    ),
    "A phase without its integer part": failure(
        numerics.oscillators, "bf16", "amplified precision cancellation", LINES,
        inside=(numerics.oscillators, numerics.wave),
    ),
    "Decays near 1 of a state-space model": failure(
        numerics.state_space, "bf16", "precision amplified", LINES,
        source="state-spaces/mamba: float32 for the recurrence's parameters",
    ),
    # -- recipes and policies
    "MXFP8 makes decays equal": failure(
        recipes.retention, "mxfp8_floor", "saturation precision",
        r"keep=.*decays", r"round(ed|ing|s)? up",
        source="arXiv 2506.20752",
        better=dataclasses.replace(sw.recipes.mxfp8_floor, keep={"decays": "bf16"}),
    ),
    "An outlier in a block of MXFP4": failure(
        recipes.outlier_channel, "mxfp4_forward", "underflow precision swamping",
        r"keep=.*down",
        source="arXiv 2208.07339",
        better=dataclasses.replace(sw.recipes.mxfp4_forward, keep={"down": "bf16"}),
    ),
    "A massive activation under autocast": failure(
        recipes.massive_activation, "c=f16", "overflow",
        r"Rule\('full', (primitive='(mul|dot_general)'|.*function='gated')", r"c=bf16",
        inside=(recipes.gated,),
        source="arXiv 2402.17762",
        better="c=bf16",
    ),
}  # fmt: skip

for name, program in (short.SHORT | FAILURES | accumulators.ACCUMULATORS).items():
    register("gallery", name, program)
