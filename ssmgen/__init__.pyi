"""What editors and type checkers see: the public names, which the package finds when they are first used. A test holds it to them."""

from . import errors as errors
from .api import BoundCall as BoundCall
from .api import bind as bind
from .api import explain as explain
from .api import is_warm as is_warm
from .api import supported as supported
from .families.causal_conv1d.call import causal_conv1d as causal_conv1d
from .families.causal_conv1d_update.call import causal_conv1d_update as causal_conv1d_update
from .families.chunk_delta_rule.call import chunk_delta_rule as chunk_delta_rule
from .families.chunk_delta_rule.call import chunk_delta_rule_workspace as chunk_delta_rule_workspace
from .families.chunk_delta_rule.call import chunk_gated_delta_rule as chunk_gated_delta_rule
from .families.chunk_scan.attention import chunk_lightning_attn as chunk_lightning_attn
from .families.chunk_scan.attention import chunk_simple_gla as chunk_simple_gla
from .families.chunk_scan.call import chunk_scan as chunk_scan
from .families.combine_splits.call import combine_splits as combine_splits
from .families.delta_layer.call import gdn_layer as gdn_layer
from .families.delta_layer.call import kda_layer as kda_layer
from .families.gated_rms_norm.call import gated_rms_norm as gated_rms_norm
from .families.linear_attention.call import Ring as Ring
from .families.linear_attention.call import comba as comba
from .families.linear_attention.call import delta_rule as delta_rule
from .families.linear_attention.call import dplr_delta_rule as dplr_delta_rule
from .families.linear_attention.call import gated_delta_rule as gated_delta_rule
from .families.linear_attention.call import gated_delta_rule_commit as gated_delta_rule_commit
from .families.linear_attention.call import gdn2 as gdn2
from .families.linear_attention.call import gla as gla
from .families.linear_attention.call import kda as kda
from .families.linear_attention.call import kda_commit as kda_commit
from .families.linear_attention.call import lightning_attn as lightning_attn
from .families.linear_attention.call import rwkv6 as rwkv6
from .families.linear_attention.call import rwkv7 as rwkv7
from .families.linear_attention.call import simple_gla as simple_gla
from .families.mamba2_layer.call import mamba2_layer as mamba2_layer
from .families.replay_selective_state_update.call import checkpoint_selective_state_update as checkpoint_selective_state_update
from .families.replay_selective_state_update.call import materialize_selective_state as materialize_selective_state
from .families.replay_selective_state_update.call import replay_selective_state_update as replay_selective_state_update
from .families.selective_scan.call import selective_scan as selective_scan
from .families.selective_state_update.call import selective_state_update as selective_state_update
from .registry import stats as stats
from .warming import warm as warm

__version__: str
