"""The optimisers against plain float64 transcriptions of their papers, with the library's kernels and without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import PlaitError, UsageError
from plait.kernels import native
from plait.training.optimizers import OPTIMIZERS, build_optimizer, state_bytes, table
from plait.training.optimizers.adamw import AdamWRule
from plait.training.optimizers.base import GroupSpec, RoleOptimizer, claim
from plait.training.optimizers.orthogonal import coefficients
from plait.training.roles import Described, describe_parameters
from tests.configs import CONFIGS
from tests.training import optimizer_oracles as oracles
from tests.training.optimizer_oracles import Piece, cut_pieces, difference, is_active, make_decoder, script

NAMES = sorted(OPTIMIZERS)


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to make a step: the library's kernels, and torch."""
    if request.param == "torch":
        monkeypatch.setenv("PLAIT_NATIVE_LIBRARY", "none")
    elif native.native_library() is None:
        pytest.skip(f"needs the native library: {native.reason()}")
    return str(request.param)


def run_pieces(pieces: list[Piece], choose: Callable[[Piece], tuple[Any, dict[str, Any]]]) -> None:
    """One step of the transcriptions on the gradients of now."""
    for piece in pieces:
        if is_active(piece):
            rule, numbers = choose(piece)
            rule(piece.value, piece.cut(piece.described.parameter.grad).double(), piece.state, numbers)


def check(pieces: list[Piece], allowed: float) -> None:
    for piece in pieces:
        assert difference(piece) < allowed, f"{piece.described.name} piece {piece.number}"


def test_adamw(kernels: str) -> None:
    decoder = make_decoder()
    pieces = cut_pieces(decoder)
    numbers = {"lr": 3e-3, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.2}
    optimizer = build_optimizer("adamw", decoder, **numbers)
    for _ in script(decoder):
        run_pieces(pieces, lambda p: (oracles.adamw, {**numbers, "weight_decay": 0.2 * p.decays}))
        optimizer.step()
    check(pieces, 1e-6)


@pytest.mark.parametrize("optimize_1d", [False, True])
def test_mars(kernels: str, optimize_1d: bool) -> None:
    """Gradients of norm 0.15 to 0.9, corrected up to twice as long: some are clipped and some are not."""
    decoder = make_decoder()
    pieces = cut_pieces(decoder)
    numbers = {"lr": 3e-3, "betas": (0.95, 0.99), "eps": 1e-8, "weight_decay": 0.2, "gamma": 0.025}
    optimizer = build_optimizer("mars", decoder, **numbers, optimize_1d=optimize_1d)

    def choose(p: Piece) -> tuple[Any, dict[str, Any]]:
        corrected = p.decays or optimize_1d
        return oracles.mars if corrected else oracles.adamw, {**numbers, "weight_decay": 0.2 * p.decays}

    for _ in script(decoder):
        run_pieces(pieces, choose)
        optimizer.step()
    check(pieces, 1e-6)


def test_lion(kernels: str) -> None:
    decoder = make_decoder()
    pieces = cut_pieces(decoder)
    numbers = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.3}
    optimizer = build_optimizer("lion", decoder, **numbers)
    for _ in script(decoder):
        run_pieces(pieces, lambda p: (oracles.lion, {**numbers, "weight_decay": 0.3 * p.decays}))
        optimizer.step()
    check(pieces, 1e-6)


def test_sophia(kernels: str) -> None:
    """Refreshed after 3, 6, ... steps from other gradients, with another number of positions each time."""
    decoder = make_decoder()
    pieces = cut_pieces(decoder)
    numbers = {"lr": 1e-3, "betas": (0.9, 0.95), "rho": 0.04, "eps": 1e-15, "weight_decay": 0.2}
    optimizer = build_optimizer("sophia", decoder, **numbers, hessian_interval=3)
    bs = 0
    shares = []
    for step in script(decoder):
        numbers["bs"] = bs
        run_pieces(pieces, lambda p: (oracles.sophia, {**numbers, "weight_decay": 0.2 * p.decays}))
        optimizer.step()
        shares.append(optimizer.unclipped_share())
        moved = [p for p in pieces if is_active(p)]
        expected = sum(p.state["unclipped"] for p in moved) / sum(p.value.numel() for p in moved)
        assert shares[-1] == pytest.approx(expected, abs=1e-3)  # a ratio of 1 may be rounded to either side
        if optimizer.wants_hessian(step + 1):
            bs = 5000 + 100 * step
            for d in describe_parameters(decoder):
                d.parameter.grad = d.parameter.grad * 0.2 + 0.001
            for piece in pieces:
                if is_active(piece):
                    gradient = piece.cut(piece.described.parameter.grad).double()
                    oracles.sophia_refresh(gradient, piece.state, numbers)
            assert optimizer.update_hessian(bs)
    check(pieces, 1e-6)
    assert shares[:3] == [0, 0, 0] and shares[-1] > 0.1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "ns_steps": 3},
        {"scale": "match_rms_adamw"},
        {"iteration": "polar_express", "ns_steps": 6},
    ],
    ids=str,
)
def test_muon(kernels: str, options: dict[str, Any]) -> None:
    decoder = make_decoder()
    pieces = cut_pieces(decoder)
    optimizer = build_optimizer("muon", decoder, lr=0.01, weight_decay=0.2, precision="fp32", **options)
    steps = coefficients(options.get("iteration", "newton_schulz"), options.get("ns_steps", 5))
    matrices = {"lr": 0.01, "weight_decay": 0.2, "momentum": 0.95, "nesterov": True, "scale": "original"}
    matrices |= {**options, "steps": steps}
    rest = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}

    def choose(p: Piece) -> tuple[Any, dict[str, Any]]:
        if p.described.role in ("matrix", "expert_stack"):
            return oracles.muon, matrices
        return oracles.adamw, {**rest, "weight_decay": 0.1 * p.decays}

    for _ in script(decoder):
        run_pieces(pieces, choose)
        optimizer.step()
    check(pieces, 1e-5)


def test_muon_with_q_k_and_v_as_one_matrix(kernels: str) -> None:
    decoder = plait.from_config({**CONFIGS["llama"], "num_hidden_layers": 1})
    pieces = [p for p in cut_pieces(decoder) if p.described.role == "matrix"]
    joint = [p for p in pieces if p.described.joint]
    assert [p.described.name[-13:] for p in joint] == ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
    fused = Piece(joint[0].described, 0, 0, (48, 24), torch.cat([p.value for p in joint]))
    optimizer = build_optimizer("muon", decoder, lr=0.01, weight_decay=0.0, precision="fp32", fuse_qkv=True)
    numbers = {"lr": 0.01, "weight_decay": 0.0, "momentum": 0.95, "nesterov": True, "scale": "original"}
    numbers["steps"] = coefficients("newton_schulz", 5)
    for _ in script(decoder, steps=5):
        gradient = torch.cat([p.described.parameter.grad for p in joint]).double()
        oracles.muon(fused.value, gradient, fused.state, numbers)
        run_pieces([p for p in pieces if not p.described.joint], lambda p: (oracles.muon, numbers))
        optimizer.step()
    ours = torch.cat([p.described.parameter.detach() for p in joint]).double()
    assert (ours - fused.value).norm() / fused.value.norm() < 1e-5
    check([p for p in pieces if not p.described.joint], 1e-5)


def leave(decoder: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in decoder.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_an_idle_expert_and_its_state_do_not_move(kernels: str, name: str) -> None:
    decoder = make_decoder()
    optimizer = build_optimizer(name, decoder)
    for step in script(decoder, idle=False, steps=3):
        stacks = [d for d in optimizer.described if d.experts > 1]
        assert len(stacks) == 8  # two stacks and two of their biases in each of two layers
        for d in stacks:
            if step == 2:
                d.parameter.grad[1] = 0
                d.parameter.active_experts = torch.tensor([True, False, True, True])
        before = {d.name: [d.parameter.detach().clone(), *copy_state(optimizer, d)] for d in stacks}
        optimizer.step()
        for d in stacks:
            after = [d.parameter.detach(), *copy_state(optimizer, d)]
            for old, new in zip(before[d.name], after, strict=True):
                assert torch.equal(old[1], new[1]) == (step == 2), d.name
                assert not torch.equal(old[0], new[0])


def copy_state(optimizer: RoleOptimizer, d: Described) -> list[Tensor]:
    state = optimizer.state[d.parameter]
    return [value.clone() for name, value in state.items() if name != "hessian"]  # it moves when it is refreshed


@pytest.mark.parametrize("name", NAMES)
def test_a_rate_of_zero_leaves_the_weights_bit_equal(kernels: str, name: str) -> None:
    decoder = make_decoder()
    optimizer = build_optimizer(name, decoder, lr=0.0, **({"adamw_lr": 0.0} if name == "muon" else {}))
    before = leave(decoder)
    for _ in script(decoder, steps=3):
        optimizer.step()
    assert all(torch.equal(p, before[n]) for n, p in decoder.named_parameters())


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.0, 0.99), (0.9, 0.0)])
def test_beta_edges_and_no_decay(kernels: str, betas: tuple[float, float]) -> None:
    decoder = make_decoder()
    pieces = cut_pieces(decoder)
    numbers = {"lr": 3e-3, "betas": betas, "eps": 1e-8, "weight_decay": 0.0}
    optimizer = build_optimizer("adamw", decoder, **numbers)
    for _ in script(decoder, steps=4):
        run_pieces(pieces, lambda p: (oracles.adamw, numbers))
        optimizer.step()
    check(pieces, 1e-6)


def test_mars_without_correction_is_adamw(kernels: str) -> None:
    """gamma 0, and gradients too short to be clipped (norm 0.15 at most)."""
    results = []
    for name, extra in (("adamw", {}), ("mars", {"gamma": 0.0})):
        decoder = make_decoder()
        optimizer = build_optimizer(name, decoder, lr=1e-3, betas=(0.9, 0.95), **extra)
        for _ in script(decoder, size=0.02):
            optimizer.step()
        results.append(leave(decoder))
    for name, tensor in results[0].items():
        assert (tensor - results[1][name]).norm() <= 1e-6 * tensor.norm()


def test_mars_keeps_a_copy_of_the_gradient_that_the_step_got(kernels: str) -> None:
    decoder = make_decoder()
    optimizer = build_optimizer("mars", decoder)
    weight = decoder.model.embed_tokens.weight
    for _ in script(decoder, steps=1):
        seen = weight.grad.clone()
        optimizer.step()
        weight.grad.mul_(0)  # as the next backward will
    assert torch.equal(optimizer.state[weight]["last_grad"], seen)
    weight.grad = None  # a skipped step
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["last_grad"], seen)


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_state_continues_to_the_same_bits(kernels: str, name: str, tmp_path: Any) -> None:
    first = make_decoder()
    optimizer = build_optimizer(name, first)
    second: nn.Module | None = None
    for step in script(first, steps=6):
        if step == 3:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            torch.save(optimizer.state_dict(), tmp_path / "state")
            second = copy.deepcopy(first)
            other = build_optimizer(name, second)
            other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
            assert [group["lr"] for group in other.param_groups] == [g["lr"] for g in optimizer.param_groups]
            assert [group["initial_lr"] for group in other.param_groups] != [g["lr"] for g in optimizer.param_groups]
        if second is not None:
            for mine, theirs in zip(second.parameters(), first.parameters(), strict=True):
                mine.grad = theirs.grad.clone()
                mine.active_experts = getattr(theirs, "active_experts", None)
            if name == "sophia":
                assert optimizer.update_hessian(10 + step) and other.update_hessian(10 + step)
            other.step()
        optimizer.step()
    assert second is not None
    for (n, mine), theirs in zip(second.named_parameters(), first.parameters(), strict=True):
        assert torch.equal(mine, theirs), n


@pytest.mark.parametrize(("name", "multiple"), [("adamw", 2), ("mars", 3), ("lion", 1), ("sophia", 2)])
def test_state_is_this_many_times_the_parameters(name: str, multiple: int) -> None:
    decoder = plait.from_config(CONFIGS["llama"])
    optimizer = build_optimizer(name, decoder)
    tensors = list(decoder.parameters())
    numbers = sum(p.numel() for p in tensors)
    # Beside it a count of steps per tensor. Under MARS norms and biases have no gradient from before.
    vectors = sum(p.numel() for p in tensors if p.ndim == 1) if name == "mars" else 0
    assert state_bytes(optimizer) == 4 * (multiple * numbers - vectors) + 8 * len(tensors)


def test_muon_keeps_one_state_for_matrices() -> None:
    decoder = plait.from_config(CONFIGS["llama"])
    optimizer = build_optimizer("muon", decoder)
    matrices = sum(p.numel() for n, p in decoder.named_parameters() if "proj.weight" in n)
    rest = sum(p.numel() for p in decoder.parameters()) - matrices
    assert state_bytes(optimizer) == 4 * (matrices + 2 * rest) + 8 * len(list(decoder.parameters()))


def toy_loss(decoder: Any, ids: Tensor) -> Tensor:
    logits = decoder.logits(decoder(ids[:, :-1]))
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("name", NAMES)
def test_it_lowers_a_toy_loss(kernels: str, name: str) -> None:
    decoder = plait.from_config({**CONFIGS["qwen3_moe"], "num_hidden_layers": 2, "initializer_range": 0.1})
    rates = {"adamw": 5e-3, "mars": 5e-3, "lion": 1e-3, "muon": 0.02, "sophia": 2e-3}
    optimizer = build_optimizer(name, decoder, lr=rates[name])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 96, (4, 13), generator=generator)
    losses = []
    for step in range(30):
        optimizer.zero_grad()
        loss = toy_loss(decoder, ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if name == "sophia" and optimizer.wants_hessian(step + 1):
            optimizer.zero_grad()
            logits = decoder.logits(decoder(ids[:, :-1])).flatten(0, 1)
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator).squeeze(1)
            nn.functional.cross_entropy(logits, drawn).backward()
            assert optimizer.update_hessian(len(drawn))
    assert losses[-1] < 0.7 * losses[0]


def test_sophias_curvature_is_the_diagonal_of_gauss_newton(kernels: str) -> None:
    """Logistic regression over 3 classes: the diagonal is the mean of p_k (1 - p_k) x_d^2. 10,000 draws of all labels,
    every one a refresh; bs h averages to it. A draw's relative deviation is about sqrt(2): 1.4% after 10,000."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4, generator=generator)
    weight = nn.Parameter(torch.randn(3, 4, generator=generator))
    optimizer = OPTIMIZERS["sophia"](betas=(0.9, 0.0)).build([Described("w", weight, "matrix")])
    p = (x @ weight.detach().T).softmax(-1)
    expected = (p * (1 - p)).T @ (x * x) / len(x)
    labels = torch.multinomial(p, 10_000, replacement=True, generator=generator)
    total = torch.zeros_like(expected)
    for draw in range(10_000):
        error = p - nn.functional.one_hot(labels[:, draw], 3)
        weight.grad = error.T @ x / len(x)  # of the mean cross-entropy
        assert optimizer.update_hessian(len(x))
        total += len(x) * optimizer.state[weight]["hessian"]
    assert torch.allclose(total / 10_000, expected, rtol=0.05)


def test_a_refresh_that_overflows_changes_nothing_and_is_counted() -> None:
    decoder = make_decoder()
    optimizer = build_optimizer("sophia", decoder)
    for _ in script(decoder, steps=1):
        assert optimizer.update_hessian(100)
        before = {d.name: optimizer.state[d.parameter]["hessian"].clone() for d in optimizer.described}
        decoder.lm_head.weight.grad[3, 3] = float("inf")
        assert not optimizer.update_hessian(200)
    assert optimizer.skipped_refreshes == 1
    assert all(torch.equal(optimizer.state[d.parameter]["hessian"], before[d.name]) for d in optimizer.described)
    assert {group["positions"] for group in optimizer.param_groups} == {100}
    with pytest.raises(UsageError, match="drawn positions, not 0"):
        optimizer.update_hessian(0)


def test_sophia_is_asked_for_curvature_every_tenth_step() -> None:
    optimizer = build_optimizer("sophia", make_decoder())
    assert [step for step in range(35) if optimizer.wants_hessian(step)] == [10, 20, 30]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_parameters_of_half_precision_follow_a_copy_in_float32(kernels: str, name: str, dtype: torch.dtype) -> None:
    """The rate is too small for one step to change most numbers: the copy adds the steps up."""
    decoder, reference = make_decoder().to(dtype), make_decoder().to(dtype).float()
    precision = {"precision": "fp32", "adamw_lr": 1e-5} if name == "muon" else {}
    optimizer, plain = (build_optimizer(name, d, lr=1e-5, **precision) for d in (decoder, reference))
    for _ in script(decoder, steps=5):
        for mine, theirs in zip(decoder.parameters(), reference.parameters(), strict=True):
            theirs.grad = mine.grad.float()
            theirs.active_experts = getattr(mine, "active_experts", None)
        optimizer.step()
        plain.step()
    for (n, mine), theirs in zip(decoder.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(mine.dtype)), n
        if mine.dtype == dtype:  # a router stays in float32
            assert torch.equal(optimizer.state[mine]["master"], theirs), n


def test_groups_and_the_table_have_every_parameter_once() -> None:
    decoder = plait.from_config(CONFIGS["dots1"])  # experts, a selection bias, q and k norms
    numbers = sum(p.numel() for p in decoder.parameters())
    for name in NAMES:
        optimizer = build_optimizer(name, decoder)
        rows = table(optimizer)
        assert sum(row["parameters"] for row in rows) == numbers
        assert sum(row["tensors"] for row in rows) == len(list(decoder.parameters()))
        assert {row["role"] for row in rows if row["group"] == "not trained"} == {"selection_bias"}
        for group in optimizer.param_groups:
            assert group["initial_lr"] == group["lr"] and group["roles"] and group["name"]
            assert (group["weight_decay"] > 0) == (group["name"] != "undecayed")
            assert not {"norm", "bias", "other"} & set(group["roles"]) or group["name"] == "undecayed"


def test_muon_takes_matrices_inside_the_layers_and_nothing_else() -> None:
    """TRN-09: the decision is by role: an embedding is a matrix of two dimensions, and goes to AdamW."""
    decoder = plait.from_config(CONFIGS["qwen2_moe"])
    rows = {row["role"]: row for row in table(build_optimizer("muon", decoder))}
    by_muon = [role for role, row in rows.items() if row["rule"] == "muon"]
    assert by_muon == ["matrix", "expert_stack"]
    assert rows["embedding"]["lr"] == 3e-3 and rows["matrix"]["lr"] == 0.02
    assert rows["norm"]["weight_decay"] == 0 and rows["router"]["weight_decay"] == 0.1


def test_a_tied_head_is_moved_and_decayed_once(kernels: str) -> None:
    """TRN-15: after a step head and embedding are still one tensor; the step is that of one parameter."""
    decoder = plait.from_config(CONFIGS["qwen2"])
    pieces = cut_pieces(decoder)
    numbers = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.5}
    optimizer = build_optimizer("adamw", decoder, **numbers)
    for _ in script(decoder, steps=2):
        run_pieces(pieces, lambda p: (oracles.adamw, {**numbers, "weight_decay": 0.5 * p.decays}))
        optimizer.step()
    assert decoder.lm_head.weight.data_ptr() == decoder.model.embed_tokens.weight.data_ptr()
    check([p for p in pieces if p.described.role == "embedding"], 1e-6)


def test_a_claim_that_is_missing_or_double_is_named() -> None:
    described = describe_parameters(plait.from_config(CONFIGS["llama"]))
    rest = ("head", "matrix", "norm", "bias")
    one = GroupSpec("one", ("embedding", *rest), AdamWRule(), 1.0, 0.0)
    assert sum(len(members) for _, members in claim(described, [one])) == len(described)
    with pytest.raises(PlaitError, match=r"embed_tokens\.weight \(embedding\) is claimed by 0 groups"):
        claim(described, [GroupSpec("rest", rest, AdamWRule(), 1.0, 0.0)])
    with pytest.raises(PlaitError, match=r"embed_tokens\.weight \(embedding\) is claimed by 2 groups"):
        claim(described, [one, GroupSpec("two", ("embedding",), AdamWRule(), 1.0, 0.0)])


def test_frozen_parameters_are_left_alone(kernels: str) -> None:
    decoder = make_decoder()
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_("self_attn" in name)
    optimizer = build_optimizer("adamw", decoder)
    before = leave(decoder)
    for _ in script(decoder, steps=1):
        optimizer.step()
    moved = {name for name, p in decoder.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in decoder.named_parameters() if p.requires_grad}
    for parameter in decoder.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter of this model is trainable"):
        build_optimizer("adamw", decoder)


def bad_requests() -> Iterator[tuple[str, dict[str, Any], str]]:
    yield "adam", {}, "unknown optimiser 'adam'; did you mean 'adamw'"
    yield "adamw", {"weight_deacy": 0.1}, "unknown hyperparameter of adamw 'weight_deacy'; did you mean 'weight_decay'"
    yield "lion", {"eps": 1e-8}, "unknown hyperparameter of lion 'eps'"
    yield "adamw", {"lr": -1.0}, "lr must be a number of at least 0, not -1.0"
    yield "adamw", {"lr": "1e-3"}, "lr must be a number of at least 0, not '1e-3'"
    yield "mars", {"betas": (0.9, 1.0)}, r"betas\[1\] must be at least 0 and below 1, not 1.0"
    yield "mars", {"betas": 0.9}, "betas must be two numbers, not 0.9"
    yield "muon", {"scale": "rms"}, "scale must be original or match_rms_adamw, not 'rms'"
    yield "muon", {"ns_steps": 0}, "ns_steps must be a whole number of at least 1, not 0"
    yield "muon", {"nesterov": 1}, "nesterov must be true or false, not 1"
    yield "sophia", {"rho": 0}, "rho must be a number above 0, not 0"


@pytest.mark.parametrize(("name", "options", "message"), list(bad_requests()))
def test_a_wrong_request_names_the_thing(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_optimizer(name, plait.from_config(CONFIGS["llama"]), **options)


def test_a_state_that_does_not_fit_is_refused_before_anything_changes() -> None:
    llama, qwen = (plait.from_config(CONFIGS[family]) for family in ("llama", "qwen3"))
    optimizer = build_optimizer("adamw", llama)
    with pytest.raises(UsageError, match="is moved by lion, this one by adamw"):
        optimizer.load_state_dict(build_optimizer("lion", llama).state_dict())
    with pytest.raises(UsageError, match="the saved optimiser has the groups"):
        optimizer.load_state_dict(build_optimizer("muon", llama).state_dict())
    with pytest.raises(UsageError, match=r"the saved \w+ of model\.layers\.0\.self_attn\.q_proj\.weight is"):
        optimizer.load_state_dict(build_optimizer("adamw", qwen).state_dict())
    with pytest.raises(UsageError, match="other parameters"):
        optimizer.add_param_group({"params": [torch.zeros(1)]})


def test_what_does_not_fit_a_parameter_is_named() -> None:
    decoder = make_decoder()
    optimizer = build_optimizer("adamw", decoder)
    stack = decoder.model.layers[0].mlp.experts.down_proj
    stack.grad = torch.zeros_like(stack)
    stack.active_experts = torch.ones(3, dtype=torch.bool)
    with pytest.raises(
        UsageError, match=r"layers\.0\.mlp\.experts\.down_proj: active_experts must be a bool tensor of 4"
    ):
        optimizer.step()
