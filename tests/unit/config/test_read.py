"""Recipes are read exactly or refused with file, line, key and advice."""

import pytest

from heedful.config.read import dotted_keys, help_text, load_recipe, recipe_path, to_yaml
from heedful.config.recipe import Recipe
from heedful.errors import ConfigError

SFT = "data: {demonstrations: d.jsonl}\nsft:\n"


def write(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("written", ["1e-5", "1.0e-5", "0.00001", '"1e-5"', "1E-5", "+1e-5"])
def test_CLI_01_a_rate_is_a_number_however_it_is_written(tmp_path, written):
    recipe = load_recipe(write(tmp_path, f"{SFT}  optimizer: {{learning_rate: {written}}}\n"))
    assert recipe.sft.optimizer.learning_rate == 1e-5
    assert "learning_rate: 1.0e-05" in to_yaml(recipe)


def test_CLI_01_a_word_is_refused_with_key_and_value(tmp_path):
    with pytest.raises(ConfigError, match=r"recipe.yaml line 4: sft.optimizer.learning_rate: .*'abc'"):
        load_recipe(write(tmp_path, f"{SFT}  optimizer:\n    learning_rate: abc\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sft:\n  optimizer: {learning_rte: 1e-5}", "line 2: unknown key 'sft.optimizer.learning_rte'; did you"),
        ("sft:\n  learning_rate: 1e-5", "line 2: unknown key 'sft.learning_rate'; did you mean sft.op"),
        ("sft:\n  num-epochs: 3", "line 2: unknown key 'sft.num-epochs'; did you mean sft.epochs"),
        ("ppo_steps: 3", "line 1: unknown key 'ppo_steps'"),
        ("sft: {}\nppo: {steps: 3}\nppo: {epochs: 2}", "line 3: not valid YAML: the key 'ppo' is there twice"),
        ("ppo:\n  kl: [1, 2]", r"line 2: ppo.kl: must be a section of keys, such as {key: value}, got \[1, 2\]"),
        ("ppo:\n  rewards: short", r"line 2: ppo.rewards: must be a section of keys, .*, got 'short'"),
    ],
)  # fmt: skip
def test_CLI_02_unknown_keys_are_refused_with_the_nearest(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(write(tmp_path, text))


def test_CLI_02_unknown_override_is_refused():
    with pytest.raises(ConfigError, match=r"unknown option --ppo.stps; did you mean ppo.steps"):
        load_recipe("quickstart", ["--ppo.stps", "3"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is a YAML mapping"),
        ("- 1", "is a YAML mapping"),
        ("a: [", "line 1: not valid YAML"),
        ("name: x", "needs at least one stage"),
        ("sft: {}", "needs data.demonstrations"),
        ("reward: {}", "needs data.rankings"),
        ("ppo: {}\ndata: {prompts: p}", "needs a reward stage or model.reward"),
        ("evaluate: {}", "needs an sft or a ppo stage"),
        ("name: ../x\nsft: {}", "name: "),
        ("data: {rankings: r}\nreward: {}\nppo: {prompts_per_step: 6, minibatches: 4}", "must divide"),
    ],
)
def test_a_recipe_without_what_it_needs_is_refused_in_one_sentence(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(ConfigError, match="cannot be read as UTF-8"):
        load_recipe(path)


def test_an_unknown_recipe_lists_those_that_ship():
    with pytest.raises(ConfigError, match="quickstart"):
        recipe_path("quickstrat.yaml")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        (["--ppo.steps", "3"], 3), (["--ppo.steps=3"], 3), (["--ppo.lora.rank", "4"], 4),
        (["--ppo.lora", "null"], None), (["--data.prompts", "file.jsonl"], "file.jsonl"),
        (["--ppo.optimizer.learning_rate", "1e-5"], 1e-5),
    ],
)  # fmt: skip
def test_overrides_reach_their_field(override, value):
    found = load_recipe("quickstart", override)
    for part in override[0].removeprefix("--").split("=")[0].split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize("override", [["--ppo.steps"], ["ppo.steps", "3"], ["--ppo.steps", "0"], ["--ppo.steps", "x"]])
def test_bad_overrides_are_refused(override):
    with pytest.raises(ConfigError):
        load_recipe("quickstart", override)


def test_the_resolved_recipe_reads_back_equal(tmp_path):
    recipe = load_recipe("quickstart")
    assert load_recipe(write(tmp_path, to_yaml(recipe))) == recipe


def test_help_explains_every_key():
    text = help_text()
    for key in dotted_keys(Recipe):
        assert f"--{key}  (" in text or f"{key}: " in text, key
    assert "        \n" not in text, "a key without a description"
    assert "--ppo.kl.target  (float or none, default null)" in text
    assert "metadata" not in text and "Ellipsis" not in text, "a type that is no word"
    assert "--reward.learning_curve  (list of float, default []" in text


def test_a_partly_written_section_keeps_the_other_defaults(tmp_path):
    written = load_recipe(write(tmp_path, f"{SFT}  optimizer: {{weight_decay: 0.01}}\n"))
    by_option = load_recipe(write(tmp_path, f"{SFT}  epochs: 2\n"), ["--sft.optimizer.weight_decay", "0.01"])
    assert written == by_option and written.sft.optimizer.learning_rate == 2e-5
    text = "data: {prompts: p}\nmodel: {reward: r}\nppo:\n  optimizer: {weight_decay: 0.1}\n"
    ppo = load_recipe(write(tmp_path, text)).ppo
    assert (ppo.optimizer.learning_rate, ppo.optimizer.schedule) == (2e-6, "constant")
    assert "--ppo.optimizer.learning_rate  (float, default 2.0e-06)" in help_text()


PARTS = """data: {prompts: p.jsonl}
model: {reward: r}
ppo:
  rewards:
    own: {model: run:reward}
    brevity:
      function: m:f
      weight: 2
"""


def test_named_parts_are_sections(tmp_path):
    path = write(tmp_path, PARTS)
    parts = load_recipe(path).ppo.rewards
    assert list(parts) == ["own", "brevity"] and parts["brevity"].weight == 2 and parts["own"].weight == 1
    changed = load_recipe(path, ["--ppo.rewards.brevity.weight", "0.5", "--ppo.rewards.judge.url", "http://host"])
    assert changed.ppo.rewards["brevity"].weight == 0.5 and changed.ppo.rewards["brevity"].function == "m:f"
    assert changed.ppo.rewards["judge"].url == "http://host" and changed.ppo.rewards["own"] == parts["own"]
    assert load_recipe(path, ["--ppo.rewards", "null"]).ppo.reward_parts.keys() == {"reward_model"}
    assert load_recipe(path, ["--ppo.rewards.own", "{url: 'https://host/a'}"]).ppo.rewards["own"].model is None
    assert load_recipe(write(tmp_path, to_yaml(changed))) == changed


def test_a_part_from_nothing_replaces_the_default_one(tmp_path):
    path = write(tmp_path, PARTS[: PARTS.index("  rewards")].replace("ppo:", "ppo: {}"))
    assert load_recipe(path, ["--ppo.rewards.mine.function", "m:f"]).ppo.reward_parts.keys() == {"mine"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("weight", "wieght", "line 8: unknown key 'ppo.rewards.brevity.wieght'; did you mean .*brevity.weight"),
        ("function", "functoin", "line 7: unknown key 'ppo.rewards.brevity.functoin'; did you mean .*brevity.function"),
        ("brevity", "two words", "line 6: ppo.rewards.two words: the name of a part is one word"),
        ("brevity", "a.b", "line 6: ppo.rewards.a.b: the name of a part is one word"),
        ("weight: 2", "weight: 0", "line 6: ppo.rewards.brevity: a part of weight 0"),
        ("weight: 2", "url: http://x", "line 6: ppo.rewards.brevity: .*one of model, function or url; 2 are given"),
        ("function: m:f", "url: host:80", "line 6: ppo.rewards.brevity: url must start with http"),
        ("run:reward", "run:sft", "line 5: ppo.rewards.own: the model that a run has of its own is run:reward"),
        ("run:reward}", "run:reward, head: 1}", "line 5: ppo.rewards.own: .*with the one output 0"),
    ],
)
def test_mistakes_in_a_part_are_found_where_they_are(tmp_path, old, new, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(write(tmp_path, PARTS.replace(old, new)))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--ppo.rewards.brevity.wieght", r"unknown option --ppo.rewards.brevity.wieght; did you mean ppo.rewards.brev"),
        ("--ppo.rewards.<name>.weight", "put a name of your own in place of <name>"),
        ("--ppo.rewards..weight", "unknown option"), ("--ppo.reward.brevity.weight", "unknown option"),
    ],
)  # fmt: skip
def test_mistakes_in_the_option_of_a_part(tmp_path, option, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(write(tmp_path, PARTS), [option, "1"])


def test_every_key_of_a_part_is_listed():
    keys = set(dotted_keys(Recipe))
    assert {"ppo.rewards", "ppo.rewards.<name>", "ppo.rewards.<name>.weight"} <= keys
    assert "--ppo.rewards.<name>.weight  (float, default 1.0)" in help_text()


@pytest.mark.parametrize(
    ("option", "value"),
    [("kl.guard.factor", 2.0), ("kl.outliers.slope", 1.0), ("ptx.data", "d.jsonl"), ("best.every_steps", 3)],
)
def test_a_section_that_is_left_out_comes_with_its_first_option(tmp_path, option, value):
    found = load_recipe(write(tmp_path, PARTS), [f"--ppo.{option}", str(value)]).ppo
    for part in option.split("."):
        found = getattr(found, part)
    assert found == value


def test_the_later_option_wins_even_over_what_is_no_section(tmp_path):
    recipe = load_recipe(write(tmp_path, PARTS), ["--ppo.lora", "3", "--ppo.lora.rank", "4"])
    assert recipe.ppo.lora.rank == 4


def test_overrides_may_complete_a_recipe(tmp_path):
    """The file alone lacks a reward model: an error by itself, not when the command line gives one."""
    path = tmp_path / "r.yaml"
    path.write_text("data: {prompts: p.jsonl}\nppo: {steps: 3}\n")
    with pytest.raises(ConfigError, match="needs a reward stage or model.reward"):
        load_recipe(path)
    with pytest.raises(ConfigError, match="needs a reward stage or model.reward"):
        load_recipe(path, ["--seed", "1"])
    assert load_recipe(path, ["--model.reward", "somewhere"]).ppo.steps == 3


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--reward.attributes", "{helpful: yes}"], "--reward.attributes: helpful must be a number, not yes or no"),
        (["--reward.learning_curve", "[0.5, no]"], "--reward.learning_curve: must be a number, not yes or no"),
        (["--reward.min_accuracy", "true"], "--reward.min_accuracy: must be a number, not yes or no, got True"),
        (["--reward.ensemble", "yes"], "--reward.ensemble: must be a number"),
        (["--reward.length_target", "yes"], "--reward.length_target: must be a number"),
        (["--reward.attributes", "{helpful: 1e308}"], "reward.attributes.helpful: input should be less than or .* 100"),
    ],
)
def test_what_is_no_number_of_any_sense_is_refused(option, message):
    assert load_recipe("quickstart", ["--reward.audit", "yes"]).reward.audit is True
    with pytest.raises(ConfigError, match=message):
        load_recipe("quickstart", option)
