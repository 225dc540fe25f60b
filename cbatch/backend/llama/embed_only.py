"""`Backend` over a model that only embeds or reranks: it has a vocabulary and no slots that compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.backend.host_limits import available_cores
from cbatch.backend.llama.embedder import LlamaEmbedder, check_pooling
from cbatch.backend.llama.fingerprint import fingerprint
from cbatch.backend.llama.grammar import LlamaGrammars
from cbatch.backend.llama.library import handshake
from cbatch.backend.llama.log import llama_log
from cbatch.backend.llama.model import LlamaModel, facts_of
from cbatch.core.plan import KvCapabilities, StepPlan, StepResult
from cbatch.core.span import ANYWHERE
from cbatch.engine_options import MAX_THREADS, EngineOptions
from cbatch.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from cbatch.backend import Embedder, Vocab
    from cbatch.embedding import Pooling
    from cbatch.options import AdapterSet
    from cbatch.support.model_facts import ModelFacts


class EmbedOnlyBackend:
    """Implements `Backend` for a model that generates no text; every plan but an empty one is a bug."""

    sampling_defaults: Mapping[str, float] = {}
    adapters: Sequence[str] = ()

    def __init__(self, model: LlamaModel, options: EngineOptions) -> None:
        """Take over a loaded model, which `close` frees."""
        handshake()
        self.model, self.options = model, options
        self.vocab: Vocab = model.vocab
        self.grammars = LlamaGrammars(model)
        self.n_slots, self.n_batch, self.cuts = options.n_slots, options.n_batch, ANYWHERE
        self.n_window = model.n_embed_max
        self.memory = KvCapabilities("partitioned", self.n_slots * self.n_window)
        self.n_threads = options.n_threads or min(available_cores(), MAX_THREADS)
        self._is_closed = False
        llama_log().install()

    def make_embedder(self, pooling: Pooling) -> Embedder:
        """Return what computes vectors; see `Backend.make_embedder`."""
        check_pooling(self.model, pooling)
        return LlamaEmbedder(self.model, self.options, self.n_threads, pooling)

    def run(self, plan: StepPlan) -> StepResult:
        """Do an empty plan; see `Backend.run`."""
        if plan.spans:
            raise PlanError(self.model.why_not_generative)
        return StepResult([], 0)

    @property
    def model_facts(self) -> ModelFacts:
        """What the model is; see `Backend.model_facts`."""
        return facts_of(self.model)

    @property
    def answer_settings(self) -> Mapping[str, str]:
        """Settings that vectors depend on; see `Backend.answer_settings`."""
        return {"exact": str(self.options.exact)}

    def fingerprint(self, adapters: AdapterSet) -> Mapping[str, str]:
        """Return what vectors depend on; see `Backend.fingerprint`."""
        return fingerprint(self.model.digest, self.options)

    def validate_state(self, data: NDArray[np.uint8], n_wanted: int) -> NDArray[np.uint8]:
        """Refuse cells: there are none; see `Backend.validate_state`."""
        raise ValueError("are of a model that generates text")

    def import_state(self, key: int, data: NDArray[np.uint8], n_cells: int) -> None:
        """Do nothing; see `Backend.import_state`."""

    def export_state(self, key: int, *, is_kept: bool = False) -> NDArray[np.uint8] | None:
        """Return None; see `Backend.export_state`."""
        return None

    def rest(self) -> None:
        """Do nothing: the thread that computes texts ends where none waits; see `Backend.rest`."""

    def interrupt(self) -> None:
        """Do nothing; see `Backend.interrupt`."""

    def close(self) -> None:
        """Free the model. Twice is harmless."""
        if not self._is_closed:
            self._is_closed = True
            self.grammars.close()
            self.model.close()
            llama_log().remove()
