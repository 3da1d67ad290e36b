"""Rollouts by an engine: the role `rollout.engine`, colocate's own engines, and the contract of an engine.

`rollout.engine` is built on colocate's public API only. Engines are found by the entry-point group `colocate.engines`;
`transformers` and `vllm` come with colocate.
"""

from colocate_rollout.buffer import Buffer as Buffer
from colocate_rollout.child import ChildOptions as ChildOptions
from colocate_rollout.contract import (
    Engine as Engine,
    Finish as Finish,
    Prompt as Prompt,
    Row as Row,
    Sampling as Sampling,
)
