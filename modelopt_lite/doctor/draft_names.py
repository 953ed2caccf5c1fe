"""The part of a first draft that says what matrices are called on disk."""

from __future__ import annotations

from collections.abc import Iterable

from modelopt_lite.checkpoint.names import NameMap
from modelopt_lite.doctor.disk import roles_in_layers
from modelopt_lite.doctor.subject import Subject
from modelopt_lite.models.specs import NamingSpec
from modelopt_lite.offload.units import output_head


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """Return each once, in the order of appearance."""
    return tuple(dict.fromkeys(names))


def draft_naming(subject: Subject) -> NamingSpec | None:
    """What the names on disk say; None where that does not tell all."""
    found: list[str] = []
    lists: list[str] = []
    embeddings: list[str] = []
    heads: list[str] = []
    for made in subject.instances:
        names = made.names
        if not isinstance(names, NameMap):
            return None
        found += sorted(roles_in_layers(subject, made))
        modules = dict(made.model.named_modules())
        layers = subject.layers(made)
        try:
            embedding = made.model.get_input_embeddings()
        except NotImplementedError:  # a composite of several models that have one each
            return None
        for source in made.saved[0]:
            place = names.place(source)
            if place is None:
                continue
            owner = place[0].rpartition(".")[0]
            inside = next((path for path in layers if owner.startswith(f"{path}.")), None)
            if inside is not None:
                number = inside.rpartition(".")[2]
                head, found_at, _ = source.partition(f".{number}.")
                lists += [head] if found_at else []
            elif modules.get(owner) is embedding:
                embeddings.append(source.removesuffix(".weight"))
        head_found = output_head(made.model)
        heads += [head_found[0]] if head_found is not None else []
    config = subject.instances[0].config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return NamingSpec(
        layer_linear_names=unique(found),
        layer_lists=unique(lists),
        embedding_names=unique(embeddings),
        head_names=unique(heads) or ("lm_head",),
        is_tied=bool(getattr(type(text)(), "tie_word_embeddings", False)),
        layer_count_keys=_count_keys(subject) or ("num_hidden_layers",),
    )


def _count_keys(subject: Subject) -> tuple[str, ...]:
    """Return the keys of config.json that give the number of layers, one for each model."""
    found: list[str] = []
    for made in subject.instances:
        written = made.saved[1]
        written = written.get("text_config", written)
        count = len(subject.layers(made))
        usual = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
        lists = [k for k, v in written.items() if isinstance(v, list) and len(v) == count]
        kinds = [k for k in lists if k.endswith(("_type", "_types"))]
        found += [k for k in (*usual, *kinds) if written.get(k) is not None][:1]
    return unique(found)
