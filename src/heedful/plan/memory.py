"""Memory of a recipe: what every stage holds in each of its phases; the largest phase is the peak.

What is held follows ``models/roles.py`` and ``train/step.py``:

    trained fully     weights, gradients and both moments of AdamW in float32: 4 + 4 + 8 bytes per parameter
    under adapters    the base in the compute precision (2 or 4), or its matrix products in few bits; 16 bytes per
                      parameter of the adapters
    frozen twins      reference and reward beside fully trained models: what autocast casts in the compute precision,
                      the rest (a tied output layer too) in float32, so that they compute alike
    the engine        PPO decodes with a copy of the policy in the compute precision, which is there in the rollout only

Gradients live from the first micro-batch of an optimizer step to its end, moments from the first step on; those of an
input embedding that is no output layer, for the tokens that were read. Moments that wait in main memory (on a GPU,
``train/moments.py``) come in buckets at the end of an optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from heedful.config.section import LoraConfig, OptimizerConfig
from heedful.plan import activations
from heedful.plan.activations import Batch, Training
from heedful.plan.machine import LIBRARY_BYTES, Kernel
from heedful.plan.parts import FLOAT32, Model, Phase, Setup, StagePlan
from heedful.plan.shape import ModelShape
from heedful.plan.workload import StageWork

MOMENTS = 8
"""Bytes of AdamW's two float32 moments per trained parameter."""
BUCKETS_BYTES = 2 * 256 * 2**20
"""Of offloaded moments that are on the device during a step (two of ``train.moments.BUCKET_BYTES``)."""
HEAP_FULL, HEAP_MIXED, HEAP_ADAPTED_RANKINGS = 0.25, 0.6, 1.2
"""On a CPU glibc leaves holes between the tensors that a forward keeps, where casts and gradients were; a share of the
activations, measured. Tensors of more different sizes make larger ones: the adapters' float32 copies of their inputs,
and packed rankings, of which no two batches have one shape; most of all both together."""
HEAP_MERGE = 0.35
"""The same for weights that are merged one after the other."""


def plan_memory(setup: Setup) -> list[StagePlan]:
    """Every stage of the recipe."""
    builders = {"sft": _sft, "reward": _reward, "ppo": _ppo, "evaluate": _evaluate}
    return [builders[stage](setup) for stage in setup.recipe.stages]


def training_of(lora: LoraConfig | None, *, recompute: bool = False) -> Training:
    """How a section of the recipe trains its model."""
    return Training(recompute=recompute) if lora is None else Training(lora.rank, lora.targets, recompute)


def trained(setup: Setup, part: str, lora: LoraConfig | None, optimizer: OptimizerConfig, *, scalar: bool,
            recompute: bool = False, shape: ModelShape | None = None) -> Model:  # fmt: skip
    """A model under training: float32, or the compute precision under adapters."""
    shape = shape or (setup.reward if scalar else setup.base)
    model = Model(part, shape, scalar, FLOAT32 if lora is None else setup.s, training_of(lora, recompute=recompute),
                  offloads_moments=optimizer.offload and setup.machine.kind != "cpu")  # fmt: skip
    return model if lora is None else replace(model, form=lora.base)


def _libraries(setup: Setup) -> dict[str, int]:
    return {"libraries": LIBRARY_BYTES if setup.machine.kind == "cpu" else 0}


def _sft(setup: Setup) -> StagePlan:
    config, work = setup.recipe.sft, setup.work.sft
    assert config is not None and work is not None
    policy = trained(setup, "policy", config.lora, config.optimizer, scalar=False)
    held = {**_libraries(setup), **_of_models([policy]), **_moments([policy], work), **_casts([policy], setup)}
    phases = (*_loading(setup, [policy]), Phase("train", {**held, **_training(policy, work, setup)}),
              *_saving(setup, held, policy))  # fmt: skip
    beside = _beside(setup, policy, [policy], work)
    return StagePlan("sft", phases, _disk([policy], work, policy, config.checkpoint.keep), beside)


def _reward(setup: Setup) -> StagePlan:
    config, work = setup.recipe.reward, setup.work.reward
    assert config is not None and work is not None
    model = trained(setup, "reward", config.lora, config.optimizer, scalar=True, shape=setup.base)
    if config.train == "head":
        model = replace(model, weight_bytes=FLOAT32, training=None, form="float", head_only=True)
    held = {**_libraries(setup), **_of_models([model]), **_moments([model], work), **_casts([model], setup)}
    if config.keep == "best":
        held["best weights"] = model.num_trained * FLOAT32
    phases = (*_loading(setup, [model]), Phase("train", {**held, **_training(model, work, setup)}),
              *_saving(setup, held, model))  # fmt: skip
    beside = _beside(setup, model, [model], work)
    return StagePlan("reward", phases, _disk([model], work, model, config.checkpoint.keep), beside)


def _evaluate(setup: Setup) -> StagePlan:
    config, recipe = setup.recipe.evaluate, setup.recipe
    assert config is not None
    policy = Model("policy", setup.base, False, FLOAT32, product_bytes=setup.s)
    answer = config.max_new_tokens or (recipe.ppo.sampling.max_new_tokens if recipe.ppo else 256)
    rows, held = min(config.batch_size, config.max_prompts), _libraries(setup)
    loaded = {"policy: float weights": policy.num_own * FLOAT32}
    if setup.machine.kind == "cpu":
        loaded["policy: file"] = policy.num_own * FLOAT32  # it is mapped, and its pages count as the process's
    phases = [
        Phase("load", {**held, **loaded}),
        Phase("copy to the engine", {**held, **_of_models([policy]), "engine: parameters": _engine(setup)}),
        _rollout(setup, held, rows, setup.work.evaluate_prompt_tokens, answer),
    ]
    if recipe.reward is not None or recipe.model.reward:
        reader = Model("reward", setup.reward, True, FLOAT32, product_bytes=setup.s)
        length = setup.work.evaluate_prompt_tokens + answer
        batch = Batch(max(1, 4096 // length), length, 1)
        working = activations.inference(setup.reward, batch, s=setup.s, residual=FLOAT32, kernel=setup.kernel)
        phases.append(Phase("score", {**_libraries(setup), **_of_models([reader]), "activations": working}))
    return StagePlan("evaluate", tuple(phases))


def ppo_models(setup: Setup) -> list[Model]:
    """The parts of PPO that are models of their own, as ``models/roles.py`` builds them."""
    config = setup.recipe.ppo
    assert config is not None
    lora, recompute, s = config.lora, config.activation_checkpointing, setup.s
    shared, separate = config.roles == "shared", config.roles == "separate"
    models = [trained(setup, "policy", lora, config.optimizer, scalar=False, recompute=recompute)]
    if lora is None or separate:
        form = "float" if lora is None else lora.base  # the policy as it was at the start
        held = FLOAT32 if lora is None else s
        models.append(Model("reference", setup.base, False, held, form=form, product_bytes=s))
    if config.value_from in ("reward", "policy"):
        shape = setup.reward if config.value_from == "reward" else setup.base
        value = trained(setup, "value", lora, config.value_optimizer, scalar=True, recompute=recompute, shape=shape)
        models.append(replace(value, on_policy=shared))
    if shared and config.uses_own_reward:
        of_reward = setup.recipe.reward.lora if setup.recipe.reward else lora
        adapter = None if of_reward is None else training_of(of_reward)
        models.append(Model("reward", setup.reward, True, s, adapter, frozen=True, on_policy=True))
    elif config.uses_own_reward and (config.value_from != "reward" or lora is None or separate):
        models.append(Model("reward", setup.reward, True, FLOAT32 if lora is None else s, product_bytes=s))
    models += [Model(f"reward {n}", shape, True, setup.s) for n, shape in enumerate(setup.more_rewards, start=2)]
    if config.frozen_weights == "int8":
        models = [m if m.training and m.training.rank is None or m.form != "float" else replace(m, form="int8")
                  for m in models]  # fmt: skip
    return models


def _ppo(setup: Setup) -> StagePlan:
    config, work = setup.recipe.ppo, setup.work.ppo
    assert config is not None and work is not None
    models = ppo_models(setup)
    policy = models[0]
    value = next((m for m in models if m.part == "value"), None)
    waiting = waiting_models(setup)
    held = {**_libraries(setup), **_of_models([m for m in models if m not in waiting]), **_casts(models, setup)}
    phases = list(_loading(setup, models))
    if config.self_test and work.in_self_test and setup.machine.kind == "cpu":  # elsewhere it reserves the moments too
        beside = _kept_beside(value, work.in_self_test, setup) if value else {}
        one = replace(work.in_self_test, num_per_step=1)
        phases.append(Phase("self-test", {**held, **training_parts(policy, one, setup, beside)}))
    held |= _moments(models, work)
    copies = (config.ema_decay is not None) + (config.best is not None)
    if copies and setup.machine.kind == "cpu" or config.ema_decay is not None:
        held["averaged and best weights"] = copies * policy.num_trained * FLOAT32
    rows = min(config.sampling.answers_together, config.samples_per_step)
    phases += [
        _rollout(setup, held, rows, setup.work.prompt_tokens, config.sampling.max_new_tokens),
        Phase("score", {**held, **_of_models(waiting), **_scoring(setup, models, work.largest)}),
    ]
    if "exact" in (config.kl.in_reward, config.kl.in_loss):  # it reads the reference beside the policy's graph
        held |= _of_models(waiting)
    if config.value_from == "frozen_trunk" or value is None:
        phases.append(Phase("train policy and value", {**held, **_training(policy, work, setup)}))
    else:
        beside = _kept_beside(value, work.largest, setup)
        phases.append(Phase("train policy", {**held, **_training(policy, work, setup, beside)}))
        phases.append(Phase("train value", {**held, **_training(value, work, setup)}))
    reads_again = config.lora is not None and config.lora.base == "float" and policy.form != "float"
    phases += _saving(setup, held, policy, reads_again=reads_again)
    trains = [m for m in models if not m.frozen]
    disk = _disk(trains, work, policy, config.checkpoint.keep)
    if setup.machine.kind == "cpu":
        disk["models that wait"] = sum(m.held_bytes for m in waiting)
    return StagePlan("ppo", tuple(phases), disk, _beside(setup, policy, trains, work, waiting))


def waiting_models(setup: Setup) -> list[Model]:
    """The frozen models that wait elsewhere until the scoring (``models/offload.py``)."""
    config = setup.recipe.ppo
    offloads = config is not None and config.offload_frozen
    return [m for m in ppo_models(setup) if m.training is None] if offloads else []


def _casts(models: list[Model], setup: Setup) -> dict[str, int]:
    """A product casts its weight and forgets the cast; nf4 goes by float32 (and numbers of levels before)."""
    each = {"int8": setup.s, "nf4": FLOAT32 + (setup.s if setup.s < FLOAT32 else 2)}
    found = [x.num_weights * each[m.form] for m in models if m.form != "float" for x in m.shape.all_linears()]
    return {"cast of a rounded weight": max(found)} if found else {}


def _loading(setup: Setup, models: list[Model]) -> Iterator[Phase]:
    """Weights that end in few bits are there in float first, beside the models that are loaded already."""
    found: list[dict[str, int]] = []
    held = 0
    for model in models:
        if model.form != "float" and not model.on_policy:
            found.append({"loaded models": held, f"{model.part}: float weights": model.held_bytes + model.saved_bytes})
        held += model.held_bytes
    if found:
        largest: dict[str, int] = max(found, key=lambda parts: sum(parts.values()))
        yield Phase("load", {**_libraries(setup), **largest})


def _of_models(models: list[Model]) -> dict[str, int]:
    return {f"{m.part}: parameters": m.held_bytes for m in models}


def _moments(models: list[Model], work: StageWork) -> dict[str, int]:
    """Those that are on the device between two optimizer steps."""
    seen = work.distinct_tokens
    return {f"{m.part}: optimizer": m.num_moments(seen) * MOMENTS - moments_at_home(m, work)
            for m in models if m.num_trained and not m.frozen}  # fmt: skip


def moments_at_home(model: Model, work: StageWork) -> int:
    """Bytes of the moments that wait in main memory."""
    return model.num_moments_at_home(work.distinct_tokens) * MOMENTS


def _training(model: Model, work: StageWork, setup: Setup, beside: dict[str, int] | None = None) -> dict[str, int]:
    """What a phase holds that trains a model, with the buckets in which its moments come if they wait elsewhere."""
    parts = training_parts(model, work.largest, setup, beside)
    if at_home := moments_at_home(model, work):
        name = f"{model.part}: optimizer"
        parts[name] = _moments([model], work)[name] + min(BUCKETS_BYTES, at_home)
    return parts


def _kept_beside(value: Model, batch: Batch, setup: Setup) -> dict[str, int]:
    """Activations of the value while the policy is trained, where the scoring keeps the forwards of both for the only
    update (``PPOConfig.keeps_both_forwards``): the inputs of layers, which the backward computes again."""
    config = setup.recipe.ppo
    assert config is not None and value.training is not None
    if not config.keeps_both_forwards or config.epochs * config.minibatches * batch.num_per_step > 1:
        return {}
    kept, one = (of(value.shape, batch, value.training, s=setup.s, kernel=setup.kernel)
                 for of in (activations.trunk, activations.layer))  # fmt: skip
    return {"value: activations": kept - one}


def training_parts(model: Model, batch: Batch, setup: Setup, beside: dict[str, int] | None = None) -> dict[str, int]:
    """Gradients and everything that one micro-batch needs, at the worst moment of its backward, with the activations
    that are there ``beside`` its own.

    That is at its start, when all activations are there and the head is at work; or at its end, when all gradients are
    and that of the embedding is being added. With several micro-batches gradients are there at the start too.
    """
    s, kernel, shape = setup.s, setup.kernel, model.shape
    gradients = model.num_trained * FLOAT32
    if model.training is None:  # the head alone, on a frozen trunk
        return {f"{model.part}: gradients": gradients,
                "activations": activations.inference(shape, batch, s=s, residual=FLOAT32, kernel=kernel)}  # fmt: skip
    full = model.training.rank is None
    are_rankings = model.scalar and batch.packed
    shares = (HEAP_FULL, HEAP_MIXED) if full else (HEAP_MIXED, HEAP_ADAPTED_RANKINGS)
    share = shares[are_rankings]
    kept = activations.trunk(shape, batch, model.training, s=s, kernel=kernel)
    layer = activations.layer(shape, batch, model.training, s=s, kernel=kernel)
    working = activations.working(shape, batch, s=s, kernel=kernel)
    head = 0 if model.scalar else activations.output_layer(
        shape, batch.counted_tokens, setup.machine.kind, s=s, trained=full, backward=True
    )  # fmt: skip
    there_at_start = gradients if batch.num_per_step > 1 else 0
    # that of a tied one is added to the output layer's by rows
    adds_rows = shape.tied and not model.scalar and not there_at_start
    of_embedding = shape.num_embedding * FLOAT32 if full and not adds_rows else 0
    start = there_at_start + kept + max(head, working)
    end = gradients + of_embedding + layer + working
    if end > start:
        parts = {"activations": layer + working, "embedding gradient": of_embedding, **(beside or {})}
        return {f"{model.part}: gradients": gradients, **parts, **_holes(parts, setup, share)}
    parts = {"activations": kept, "logits and output layer" if head > working else "working memory": max(head, working),
             **(beside or {})}  # fmt: skip
    return {f"{model.part}: gradients": there_at_start, **parts, **_holes(parts, setup, share)}


def _holes(parts: dict[str, int], setup: Setup, share: float) -> dict[str, int]:
    return {"holes in the heap": int(share * sum(parts.values()))} if setup.machine.kind == "cpu" else {}


def _scoring(setup: Setup, models: list[Model], batch: Batch) -> dict[str, int]:
    """The largest forward without gradients; casts of trained weights are kept while it runs."""
    s, found = setup.s, []
    for model in models:
        residual = model.weight_bytes
        trunk = activations.inference(model.shape, batch, s=s, residual=residual, kernel=setup.kernel)
        cast = model.cast_bytes if s < FLOAT32 else 0
        head = 0 if model.scalar else activations.output_layer(
            model.shape, batch.counted_tokens, setup.machine.kind, s=s, trained=model.output_bytes == FLOAT32,
            backward=False,
        )  # fmt: skip
        found.append({"casts of weights": cast, "activations": trunk} if trunk + cast > head else
                     {"logits and output layer": head})  # fmt: skip
    return max(found, key=lambda parts: sum(parts.values()))


def _engine(setup: Setup) -> int:
    """Its copy of the policy. In bfloat16 on a CPU it holds products packed, the output layer beside the embedding that
    it is tied to (``rollout/packed.py``)."""
    shape, s = setup.base, setup.s
    packs = setup.machine.kind == "cpu" and s < FLOAT32
    return s * (shape.num_causal + (shape.num_embedding if packs and shape.tied else 0))


def _rollout(setup: Setup, held: dict[str, int], rows: int, prompt: int, answer: int) -> Phase:
    """Decoding: the engine, the cache of every row at full length, and one step's logits and probabilities with two
    copies in float32, or the forward over the prompts."""
    shape, s = setup.base, setup.s
    whole: Kernel = "sdpa" if setup.kernel == "sdpa" else "eager"  # the engine knows no pieces
    prefill = activations.inference(shape, Batch(rows, prompt, 1), s=s, residual=s, kernel=whole)
    sampling = rows * shape.vocabulary * (s + 3 * FLOAT32)
    parts = {**held, "engine: parameters": _engine(setup),
             "key-value cache": activations.key_values(shape, rows, prompt + answer, s=s),
             "prefill and sampling": max(prefill, sampling)}  # fmt: skip
    return Phase("rollout", parts)


def _saving(setup: Setup, held: dict[str, int], model: Model, *, reads_again: bool = False) -> Iterator[Phase]:
    """A model with adapters is merged into a float32 copy when it is saved, weight by weight and in main memory.

    ``reads_again``: into the weights that its rounded ones were made from, read into main memory once more.
    """
    if setup.machine.kind == "cpu" and _merges(model):
        parts = {"merged copy": int(_merged_bytes(model) * (1 + HEAP_MERGE))}
        if reads_again:
            parts["weights before int8"] = model.num_own * setup.s
        yield Phase("save", {**held, **parts})


def _merges(model: Model) -> bool:
    return model.training is not None and model.training.rank is not None


def _merged_bytes(model: Model) -> int:
    twice = model.shape.num_embedding if model.shape.tied and not model.scalar else 0  # under both of its names
    return (model.num_own + twice) * FLOAT32


def _beside(setup: Setup, saved: Model, trains: Sequence[Model], work: StageWork, waiting: Sequence[Model] = ()) -> int:
    """Of main memory beside a GPU: models and moments that wait there, and the model that is saved."""
    if setup.machine.kind == "cpu":
        return 0
    wait = sum(m.held_bytes for m in waiting) + sum(moments_at_home(m, work) for m in trains)
    return wait + (_merged_bytes(saved) if _merges(saved) else saved.held_bytes)


def _disk(models: list[Model], work: StageWork, saved: Model, keep: int) -> dict[str, int]:
    """Checkpoints hold trained weights and moments; the old one goes when the new one is complete."""
    one = sum(m.num_trained * FLOAT32 + m.num_moments(work.distinct_tokens) * MOMENTS for m in models)
    adapter = saved.num_trained * FLOAT32 if saved.training and saved.training.rank is not None else 0
    return {"checkpoints": one * (keep + 1), "model": saved.num_own * FLOAT32 + adapter}
