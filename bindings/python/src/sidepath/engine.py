"""The serving engine in this process: one base, many adapters, one batch.

    engine = sidepath.Engine("models/base", {"sql": "adapters/sql"})
    engine.publish("policy", peft_model)                     # what it is now, from memory
    answers = engine.generate(["Once", "Twice"], ["policy", None], max_tokens=32, logprobs=True)
    logprobs = engine.score([answers[0].prompt_tokens + answers[0].tokens], "policy")

A request holds the version of its adapter that its name meant when it was submitted. What scoring
says of a token is bit for bit what sampling said of it, under the same version, scale and device.

Threads may share an engine: calls take turns, between two steps."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass, field
from typing import Any, Mapping, NamedTuple, Optional, Sequence, Union

from . import arrays, errors
from ._library import (NULL, Handle, attempt, c_text, call, encode, failure, ffi, lib, made, struct,
                       text)
from .adapter import (Adapter, PathLike, TensorTable, _json_bytes, digest_text, peft_parts)

FINISH = {lib.SP_FINISH_STOP: "stop", lib.SP_FINISH_LENGTH: "length"}
WAIT_MS = 20
Prompt = Union[str, Sequence[int]]


@dataclass
class Completion:
    """What became of one request."""
    index: int
    adapter: Optional[str]  # None: the base
    adapter_digest: Optional[str]
    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""  # "stop" or "length"
    logprobs: list[float] = field(default_factory=list)  # of each token, where asked for
    prompt_logprobs: list[float] = field(default_factory=list)  # of each but the first
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    processed_logprobs: list[float] = field(default_factory=list)  # of scored and new tokens
    # Experts of the tokens that were inputs, all but the last new one, where asked for: uint16
    # [tokens, layers with experts, experts of a token]; numpy.asarray and tolist() take it.
    routed_experts: Optional[memoryview] = None


class Scores(list[float]):
    """The logprobs of a sequence's scored tokens, as a list."""
    routed_experts: Optional[memoryview] = None  # where asked for: of all of its tokens


class Loaded(NamedTuple):
    """What a name means after a load or a publish."""
    name: str
    digest: str
    generation: int
    receipt: dict[str, Any]


@dataclass
class _Running:
    completion: Completion
    with_logprobs: bool
    processed: bool
    routing: tuple[int, int]  # layers with experts and experts of a token
    pieces: list[bytes] = field(default_factory=list)
    failed: Optional[errors.SidepathError] = None
    done: bool = False


def _set(out: Any, kind: str, fields: Mapping[str, Any]) -> list[Any]:
    """Fields by their names in the header; an unknown one is named. Gives what they point to."""
    known, kept = {name for name, _ in ffi.typeof(kind).fields}, []
    for name, value in fields.items():
        if name not in known or name == "struct_bytes":
            raise errors.WrongCall("unknown-field", name, -1, "%s has no %r; include/sidepath/"
                                   "engine.h says what it has" % (kind, name))
        if isinstance(value, (str, os.PathLike)):
            kept.append(c_text(value, name))
            value = kept[-1]
        try:
            setattr(out, name, value)
        except (TypeError, OverflowError) as error:
            raise errors.WrongCall("bad-field", name, -1, str(error)) from None
    return kept


class Engine(Handle):
    """`model` is a directory in the format of Hugging Face. `adapters` are loaded at start.
    `device`: "cpu", "cuda", "cuda:N", or "auto". `precision`: "bf16" to serve, "f32" to check (on
    the CPU). Further keywords are fields of sp_engine_options, such as max_lora_rank, max_context,
    max_running, kv_tokens, threads, memory_bytes."""

    def __init__(self, model: PathLike, adapters: Optional[Mapping[str, PathLike]] = None, *,
                 device: str = "auto", precision: Any = "bf16", max_loras: int = 8,
                 lora_modules: Optional[str] = None, **options: Any) -> None:
        kept = [c_text(model, "model"), c_text(device, "device"),
                c_text(lora_modules, "lora_modules")]
        wanted = struct("sp_engine_options", model_dir=kept[0], device=kept[1],
                        lora_modules=kept[2], max_loras=max_loras, adapter_loading=max_loras > 0,
                        precision=arrays.dtype_number(precision, "precision"))
        kept += _set(wanted, "sp_engine_options", options)
        names = dict(adapters or {})
        texts = [(c_text(name, "name"), c_text(path, "path")) for name, path in names.items()]
        rows = ffi.new("sp_engine_adapter[]", len(texts))
        for row, (name, path) in zip(rows, texts):
            row.struct_bytes, row.name, row.path = ffi.sizeof("sp_engine_adapter"), name, path
        self._own(made("sp_engine", lib.sp_engine_open, wanted, rows, len(rows)),
                  lib.sp_engine_close)
        self.device: str = text(lib.sp_engine_device(self._pointer))
        self.base: str = text(lib.sp_engine_base_name(self._pointer))
        self.max_context: int = int(lib.sp_engine_max_context(self._pointer))
        layers, per_token = ffi.new("int32_t *"), ffi.new("int32_t *")
        lib.sp_engine_routing(self._pointer, layers, per_token)
        self._routing = int(layers[0]), int(per_token[0])
        self._process, self._turn = os.getpid(), threading.RLock()
        self._running: dict[int, _Running] = {}
        running = self._running  # not self: the callback must not keep the engine alive

        def on_event(_: Any, event: Any) -> None:
            request = running.get(event.request)
            if request is not None:
                _take(request, event)

        self._on_event = ffi.callback("sp_request_event_fn", on_event)

    def _native(self) -> Any:
        if self._process != os.getpid():
            raise errors.WrongCall("forked", "Engine", -1, "an engine's threads stay in the "
                                   "process that opened it: open one in this process")
        return self._pointer

    # ---- text -----------------------------------------------------------------------------------

    def encode(self, prompt: str, *, parse_special: bool = False,
               add_special: bool = True) -> list[int]:
        """Text to ids; add_special: with what the tokenizer puts around a prompt."""
        data, out, n = prompt.encode(), ffi.new("int32_t **"), ffi.new("int32_t *")
        function = lib.sp_engine_encode_prompt if add_special else lib.sp_engine_encode
        call(function, self._native(), data, len(data), parse_special, 0, out, n)
        tokens = ffi.unpack(out[0], n[0]) if n[0] else []
        lib.sp_engine_free(out[0])
        return list(tokens)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Ids to text."""
        out, n, ids = ffi.new("char **"), ffi.new("size_t *"), ffi.new("int32_t[]", list(tokens))
        call(lib.sp_engine_decode, self._native(), ids, len(ids), skip_special, out, n)
        data = bytes(ffi.buffer(out[0], n[0]))
        lib.sp_engine_free(out[0])
        return data.decode("utf-8", "replace")

    # ---- requests -------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt],
                 adapters: Union[str, None, Sequence[Optional[str]]] = None, *,
                 max_tokens: int = 16, seed: int = 0, logprobs: bool = False,
                 stop: Sequence[str] = (), **fields: Any) -> list[Completion]:
        """One batch: a completion for each prompt (a text, or ids), with the adapter of that
        position, or one for all; None is the base. Request i samples with seed + i. Further
        keywords are fields of sp_request: temperature (0 by default: the best id), top_k, top_p,
        min_p, lora_scale, prompt_logprobs, processed_logprobs, top_logprobs, ignore_eos,
        routed_experts (of a base that has experts) and so on.
        All are checked before the first runs; one that is dropped raises after the others."""
        texts = [c_text(word, "stop") for word in stop]
        stops = ffi.new("char *[]", texts)
        return self._run(self._requests(prompts, adapters, [], {
            "max_tokens": max_tokens, "seed": seed % 2**64, "logprobs": logprobs,
            "stop": ffi.cast("char **", stops), "n_stop": len(texts), **fields}))

    def score(self, sequences: Sequence[Sequence[int]],
              adapters: Union[str, None, Sequence[Optional[str]]] = None, *,
              prompt_lengths: Union[int, Sequence[int]] = 1, lora_scale: float = 1.0,
              routed_experts: bool = False) -> list[Scores]:
        """Logprobs of the tokens of each sequence from its prompt length on: the log-softmax of the
        model's own logits, an adapter's included, without temperature or filters. Processed ones
        are those of generate(max_tokens=0, prompt_logprobs=True, processed_logprobs=True). With
        routed_experts also the experts of each token."""
        lengths = ([prompt_lengths] * len(sequences) if isinstance(prompt_lengths, int)
                   else list(prompt_lengths))
        if len(lengths) != len(sequences):
            raise errors.WrongCall("bad-shape", "prompt_lengths", -1, "%d lengths for %d sequences"
                                   % (len(lengths), len(sequences)))
        found = self._run(self._requests(sequences, adapters, lengths, {
            "max_tokens": 0, "prompt_logprobs": True, "lora_scale": lora_scale,
            "routed_experts": routed_experts}))
        scores = [Scores(completion.prompt_logprobs) for completion in found]
        for score, completion in zip(scores, found):
            score.routed_experts = completion.routed_experts
        return scores

    def _requests(self, prompts: Sequence[Prompt], adapters: Any, scored_from: Sequence[int],
                  fields: Mapping[str, Any]) -> list[Any]:
        """The structs, with what they point to, and the completion of each."""
        requests = []
        for index, (prompt, name) in enumerate(zip(prompts, self._names(adapters, len(prompts)))):
            tokens = self.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
            ids = ffi.new("int32_t[]", tokens)
            adapter = c_text(self.base if name is None else name, "adapter")
            request = struct("sp_request", adapter=adapter, tokens=ids, n_tokens=len(tokens),
                             scored_from=scored_from[index] if scored_from else 0)
            _set(request, "sp_request", fields)
            request.seed = (request.seed + index) % 2**64
            requests.append((request, (ids, adapter), Completion(index, name, None, tokens)))
        return requests

    def _names(self, adapters: Any, n: int) -> list[Optional[str]]:
        if adapters is None or isinstance(adapters, str):
            return [adapters] * n
        names = list(adapters)
        if len(names) != n:
            raise errors.WrongCall("bad-shape", "adapters", -1, "%d adapters for %d prompts"
                                   % (len(names), n))
        return names

    def _run(self, requests: list[Any]) -> list[Completion]:
        ids: list[int] = []
        try:
            with self._turn:
                for request, _, _ in requests:
                    call(lib.sp_engine_check, self._native(), request)
                for request, _, completion in requests:
                    ids.append(self._submit(request, completion))
            mine = [self._running[number] for number in ids]
            while not all(request.done for request in mine):
                self._step()
        finally:
            self._forget(ids)
        for request in mine:
            if request.failed is not None:
                raise request.failed
            request.completion.text = b"".join(request.pieces).decode("utf-8", "replace")
        return [request.completion for request in mine]

    def _submit(self, request: Any, completion: Completion) -> int:
        out, digest = ffi.new("int64_t *"), ffi.new("sp_digest *")
        call(lib.sp_engine_submit, self._native(), request, out)
        number = int(out[0])
        self._running[number] = _Running(completion, bool(request.logprobs),
                                         bool(request.processed_logprobs), self._routing)
        call(lib.sp_engine_request_adapter, self._native(), number, NULL, digest)
        if completion.adapter is not None:
            completion.adapter_digest = digest_text(digest)
        return number

    def _step(self) -> None:
        with self._turn:
            status = attempt(lib.sp_engine_step, self._native(), self._on_event, NULL)
            if status == lib.SP_AGAIN:
                for request in self._running.values():
                    request.done = True  # nothing waits or runs: nothing more will come

    def _forget(self, ids: list[int]) -> None:
        with self._turn:
            for number in ids:
                request = self._running.pop(number)
                if not request.done:  # an exception came in between
                    lib.sp_engine_cancel(self._pointer, number, NULL)

    # ---- adapters -------------------------------------------------------------------------------

    def load(self, name: str, path: PathLike, *, replace: bool = True, pinned: bool = False,
             expected_generation: int = 0) -> Loaded:
        """Loads the adapter in a directory under a name, or replaces the one of that name: running
        requests keep their version to the end. Raises Refused, and the old version serves on."""
        kept = c_text(path, "path"), c_text(name, "name")
        options = struct("sp_stage_load_options", location=kept[0], name=kept[1], replace=replace,
                         pinned=pinned, expected_generation=expected_generation)
        with self._turn:
            ticket = ffi.new("int64_t *")
            attempt(lib.sp_stage_load, self._stage(), options, ticket)
        return self._finish(name, ticket)

    def publish(self, name: str, source: Any, config: Any = None, *, adapter: str = "default",
                replace: bool = True, pinned: bool = False,
                expected_generation: int = 0) -> Loaded:
        """The same from memory: `source` is a PeftModel, of which `adapter` is taken as it is now,
        or a mapping of names to tensors with its `config`, as Adapter.from_tensors has them. It has
        no file to come back from, so it stays in the host cache while its name means it."""
        tensors, config = published_parts(source, config, adapter)
        data, table, kept = _json_bytes(config), TensorTable(on_host(tensors)), c_text(name, "name")
        options = struct("sp_stage_load_options", name=kept, replace=replace, pinned=pinned,
                         expected_generation=expected_generation)
        opened = Adapter.__new__(Adapter)
        opened._own(made("sp_adapter", lib.sp_engine_read_tensors, self._native(), kept, data,
                         len(data), table.rows, len(table.rows)), lib.sp_adapter_release)
        with opened, self._turn:
            ticket = ffi.new("int64_t *")
            attempt(lib.sp_stage_put, self._stage(), options, opened._pointer, ticket)
        return self._finish(name, ticket)

    def unload(self, name: str) -> None:
        """Removes the name at once; requests that run on it finish on it."""
        with self._turn:
            attempt(lib.sp_stage_unload, self._stage(), encode(name, "name"))

    @property
    def adapters(self) -> dict[str, Loaded]:
        """What each name means now."""
        found, info = {}, struct("sp_stage_version_info")
        with self._turn:
            stage = self._stage()
            for index in range(lib.sp_stage_n_versions(stage)):
                call(lib.sp_stage_version_at, stage, index, info)
                if info.state != lib.SP_STAGE_VERSION_DRAINING:
                    found[text(info.name)] = _loaded(info)
        return found

    def _stage(self) -> Any:
        stage = lib.sp_engine_stage(self._native())
        if stage == NULL:
            raise errors.WrongCall("no-slots", "max_loras", -1, "this engine was opened without "
                                   "adapter slots")
        return stage

    def _finish(self, name: str, ticket: Any) -> Loaded:
        """Waits for a load, between the steps of others."""
        generation, status = ffi.new("uint64_t *"), lib.SP_PENDING
        error, info = ffi.new("sp_error *"), struct("sp_stage_version_info")
        while status == lib.SP_PENDING:
            with self._turn:
                lib.sp_stage_poll_wait(self._stage(), WAIT_MS)
                status = lib.sp_stage_result(self._stage(), ticket[0], generation, error)
                if status == 0:
                    call(lib.sp_stage_find, self._stage(), encode(name, "name"), info)
                    return _loaded(info)
        raise failure(status, error)


def _loaded(info: Any) -> Loaded:
    facts = info.facts
    receipt = text(facts.receipt) if facts != NULL else ""
    return Loaded(text(info.name), digest_text(info.digest), int(info.generation),
                  json.loads(receipt) if receipt else {})


def _take(request: _Running, event: Any) -> None:
    """One event into its request."""
    completion = request.completion
    if request.processed and (event.is_prompt or event.token >= 0):
        completion.processed_logprobs.append(event.processed_logprob)
    if event.is_prompt:
        completion.prompt_logprobs.append(event.logprob)
        return
    if event.n_routed:
        shape = event.n_routed, *request.routing
        data = bytes(ffi.buffer(event.routed_experts, 2 * shape[0] * shape[1] * shape[2]))
        completion.routed_experts = memoryview(data).cast("H", shape)
    if event.token >= 0:
        completion.tokens.append(event.token)
        if request.with_logprobs:
            completion.logprobs.append(event.logprob)
        if event.n_top:
            completion.top_logprobs.append({event.top[i].token: event.top[i].logprob
                                            for i in range(event.n_top)})
    if event.text_bytes:
        request.pieces.append(bytes(ffi.buffer(event.text, event.text_bytes)))
    if event.finish == lib.SP_FINISH_FAILED:
        request.failed = failure(event.failure, event.error)
    if event.finish != lib.SP_FINISH_NONE:
        completion.finish_reason = FINISH.get(event.finish, "failed")
        request.done = True


def published_parts(source: Any, config: Any, adapter: str) -> tuple[Mapping[str, Any], Any]:
    """Tensors and config of what is to be published."""
    if config is not None:
        return source, config
    if hasattr(source, "peft_config"):
        return peft_parts(source, adapter)
    raise errors.WrongCall("no-config", "source", -1, "publish a PeftModel, or a mapping of names "
                           "to tensors with its config")


def on_host(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """torch's tensors on a GPU as copies on the host; the others as they are."""
    return {name: tensor.detach().cpu() if getattr(tensor, "is_cuda", False) else tensor
            for name, tensor in tensors.items()}
