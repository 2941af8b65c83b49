"""Recipes from YAML files and dotted overrides, with errors that name file, line, key and the nearest valid key.

The file is checked against the pydantic models as it stands, since only there the line of a mistake is known; then
``--dotted.key value`` overrides are laid over it and the whole is validated again.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from heedful.config.recipe import Recipe
from heedful.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads ``1e-5`` as a string; this loader reads it as the number that everybody means (CLI-01).

    A key that stands twice is refused: YAML would drop the first one, and half of a section with it.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys all differ."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"the key {key.value!r} is there twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_FLOAT = re.compile(r"^[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
for _first in "-+.0123456789":
    _Loader.yaml_implicit_resolvers.setdefault(_first, []).insert(0, ("tag:yaml.org,2002:float", _FLOAT))


def recipe_path(name: str) -> Path:
    """The file of a recipe: a path, or the bare name of a recipe that ships with heedful."""
    path = Path(name)
    if path.exists():
        return path
    shipped = {p.stem: p for folder in _recipe_folders() for p in sorted(folder.glob("*.yaml"))}
    if path.parent == Path(".") and path.stem in shipped:
        return shipped[path.stem]
    names = sorted(shipped)
    raise ConfigError(f"{name}: no such recipe file; the recipes that ship with heedful are: {', '.join(names)}")


def _recipe_folders() -> list[Path]:
    """``recipes/`` inside the installed package, or beside ``src/`` in a checkout."""
    package = Path(str(resources.files("heedful")))
    return [folder for folder in (package / "recipes", package.parents[1] / "recipes") if folder.is_dir()]


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in ``name`` (YAML) with ``overrides`` such as ``["--ppo.steps", "10"]`` applied.

    Raises:
        ConfigError: one sentence with file, line and key, and the nearest valid key for an unknown one.
    """
    path = recipe_path(str(name))
    data = read_yaml(path, "a recipe is a YAML mapping with keys such as model, data, sft, reward, ppo")
    _check(path, data, whole=not overrides)
    if not overrides:
        return Recipe.model_validate(data)
    return _merge(data, [str(word) for word in overrides])


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe, every default written out; reading it back gives an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def help_text(model: type[BaseModel] = Recipe, prefix: str = "") -> str:
    """Every key of a recipe with its type, default and meaning, one block per key."""
    lines = []
    for name, field in model.model_fields.items():
        section, keys = _section_of(field.annotation)
        if section is not None:
            optional = "" if field.default is not None else " (left out unless written)"
            if keys:
                lines += ["", f"{prefix}{name}: {field.description}"]
            place = f"{prefix}{name}{keys}"
            lines += ["", f"{place}: {_first_line(section)}{optional}", help_text(section, f"{place}.")]
            continue
        kind = _type_name(field.annotation)
        default = yaml.safe_dump(field.default, default_flow_style=True).split("\n")[0]
        lines.append(f"  --{prefix}{name}  ({kind}, default {default})\n        {field.description or ''}")
    return "\n".join(lines)


def _section_of(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """The section that an annotation holds, and what stands between its name and its keys: "" or, for a dict of
    sections, ".<name>"."""
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is dict:
            return _section_of(get_args(kind)[1])[0], ".<name>"
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind, ""
    return None, ""


def _first_line(section: type[BaseModel]) -> str:
    return (section.__doc__ or "").strip().split("\n")[0]


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "|".join(str(a) for a in get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
    if get_origin(annotation) is dict:
        return "{" + ": ".join(map(_type_name, get_args(annotation))) + "}"
    if get_origin(annotation) is tuple:
        return f"list of {_type_name(get_args(annotation)[0])}"
    if isinstance(annotation, type):
        return annotation.__name__
    return " or ".join("none" if a is type(None) else _type_name(a) for a in get_args(annotation)) or str(annotation)


def wrong_key(error: ValidationError, section: type[BaseModel]) -> str:
    """The first of pydantic's complaints about a section, in words: the key and what is wrong with it."""
    first = error.errors()[0]
    said = first["msg"]
    if first["type"] == "extra_forbidden":
        said = f"unknown key; known keys are {', '.join(section.model_fields)}"
    elif first["type"] == "tuple_type":
        said = "must be a list, such as [a, b]"
    return f"{'.'.join(map(str, first['loc']))}: {said}"


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """The mapping in a YAML file.

    Args:
        what: said of the file when it holds something else than a mapping.

    Raises:
        ConfigError: it cannot be read, is no YAML (names the line), has a key twice or is no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    try:
        data = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"{path} line {line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: {what}")
    return data


def _check(path: Path, data: dict[str, Any], *, whole: bool) -> None:
    """``whole``: the recipe must be complete too, since no overrides follow that could complete it."""
    try:
        Recipe.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"] and not whole:
            return
        location = tuple(str(p) for p in first["loc"] if p != "[key]")
        line = _line_of(path, location)
        where = f"{path} line {line}" if line else str(path)
        raise ConfigError(f"{where}: {_explain(first, location)}") from None


def _explain(problem: Any, location: tuple[str, ...]) -> str:
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {suggest(key)}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] in ("model_type", "dict_type"):
        message = "Must be a section of keys, such as {key: value}"
    if not key:
        return message
    got = "" if isinstance(problem["input"], dict) else f", got {problem['input']!r}"
    return f"{key}: {message[0].lower() + message[1:]}{got}"


def suggest(key: str) -> str:
    """Advice for an unknown dotted key: the nearest valid one, by full name first, then by its last word."""
    plain = key.replace("-", "_")
    keys = _keys_for(plain)
    near = difflib.get_close_matches(plain, keys, n=1, cutoff=0.75)
    last = plain.rpartition(".")[2]
    same = [k for k in keys if k.rpartition(".")[2] == last]
    if not near and not same:
        words = difflib.get_close_matches(last, {k.rpartition(".")[2] for k in keys}, n=1, cutoff=0.6)
        same = [k for k in keys if words and k.rpartition(".")[2] == words[0]]
    found = near or same[:3]
    return f"did you mean {' or '.join(found)}?" if found else "heedful run --list_keys shows every key"


def dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a recipe in dotted form; <name> stands for a word that the recipe chooses."""
    for name, field in model.model_fields.items():
        yield prefix + name
        section, keys = _section_of(field.annotation)
        if section is not None:
            if keys:
                yield f"{prefix}{name}{keys}"
            yield from dotted_keys(section, f"{prefix}{name}{keys}.")


def _keys_for(key: str) -> list[str]:
    """Every key of a recipe, <name> replaced by the word that stands there in ``key``."""
    keys = []
    for known in dotted_keys(Recipe):
        before, placeholder, after = known.partition("<name>")
        chosen = key.removeprefix(before).partition(".")[0] if placeholder and key.startswith(before) else placeholder
        keys.append(before + (chosen or placeholder) + after)
    return keys


def _line_of(path: Path, location: tuple[str, ...]) -> int | None:
    """The 1-based line of a key in the file, or of its nearest parent that is written there."""
    node: yaml.Node | None = yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=_Loader)
    line = None
    for part in location:
        if not isinstance(node, yaml.MappingNode):
            break
        for key_node, value_node in node.value:
            if str(key_node.value) == part:
                line, node = key_node.start_mark.line + 1, value_node
                break
        else:
            break
    return line


def _merge(data: dict[str, Any], overrides: list[str]) -> Recipe:
    """Apply overrides on top of checked file contents."""
    pairs = list(_override_pairs(overrides))
    merged = copy.deepcopy(data)
    for key, text in pairs:
        if "<name>" in key:
            raise ConfigError(f"option --{key}: put a name of your own in place of <name>")
        if key not in _keys_for(key):
            raise ConfigError(f"unknown option --{key}; {suggest(key)}")
        try:
            value = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
        except yaml.YAMLError:
            value = text
        target, *rest = merged, *key.split(".")
        for part in rest[:-1]:
            if not isinstance(target.get(part), dict):
                target[part] = {}
            target = target[part]
        target[rest[-1]] = value
    try:
        return Recipe.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        location = tuple(str(p) for p in first["loc"] if p != "[key]")
        raise ConfigError(f"option --{_explain(first, location)}" if location else _explain(first, ())) from None


def _override_pairs(overrides: list[str]) -> Iterator[tuple[str, str]]:
    words = iter(overrides)
    for word in words:
        if not word.startswith("--"):
            raise ConfigError(f"unexpected argument {word!r}; options are written --dotted.key value")
        key, equals, value = word[2:].partition("=")
        if not equals:
            following = next(words, None)
            if following is None:
                raise ConfigError(f"option --{key} needs a value")
            value = following
        yield key, value
