"""ONNX Runtime's fused linear attention on the CPU: ``com.microsoft.LinearAttention``, forward alone.

Its rule ``linear`` is ``S_t = S_{t-1} + k_t v_t^T``, ``o_t = scale * q_t S_t``; ``gated`` multiplies ``S_{t-1}`` by ``exp(g_t)``, ``delta``
adds ``beta_t k_t (v_t - S_{t-1}^T k_t)^T`` instead, ``gated_delta`` does both. There is no feature map and no normaliser.
"""

import math

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

#: The constant decay of the row with one.
DECAY = 0.99


class Peer:
    def __init__(self, name, q, k, v, threads, decay=None, beta=None, scale=1.0):
        """``decay`` and ``beta`` are ``[batch, token, head]``."""
        batch, heads, length, width = q.shape
        self._shape = (batch, length, heads, width)
        feeds = {"query": q, "key": k, "value": v}
        feeds = {name: x.transpose(1, 2).flatten(2).contiguous().numpy() for name, x in feeds.items()}
        rule = name.removeprefix("onnxruntime_")
        # The fourth input is a state to begin with, which is left out.
        inputs = [*feeds, "", "decay" if "gated" in rule else "", "beta" if "delta" in rule else ""]
        if "gated" in rule:
            feeds["decay"] = np.full((batch, length, heads), math.log(DECAY), np.float32) if decay is None else decay.numpy()
        if "delta" in rule:
            feeds["beta"] = beta.numpy()
        node = helper.make_node(
            "LinearAttention", inputs, ["output", "present_state"], domain="com.microsoft",
            q_num_heads=heads, kv_num_heads=heads, update_rule=rule, scale=scale,
        )
        graph = helper.make_graph(
            [node], "linear_attention",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in feeds.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output],
        )
        model = helper.make_model(
            graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Threads that spin after a call would take the cores from whoever is measured next.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        # On the arrays' own memory, so that no call copies.
        self._feeds = {name: onnxruntime.OrtValue.ortvalue_from_numpy(x) for name, x in feeds.items()}

    def run(self, backward):
        if backward:
            raise ValueError("LinearAttention of ONNX Runtime has no backward")
        return self._session.run_with_ort_values(["output"], self._feeds)[0]

    def output(self):
        """``[batch, head, token, feature]``."""
        return self.run(False).numpy().reshape(self._shape).transpose(0, 2, 1, 3)
