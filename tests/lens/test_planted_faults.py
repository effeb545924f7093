"""Mistakes in the lens, planted one at a time: the test that is named beside each must notice it."""

from functools import partial

from tests.lens import test_hooked, test_residual
from tests.planted import each_is_noticed
from tnlm.lens import activations, residual, weights
from tnlm.lens import hooked as hooked_module

NAMES = partial(test_residual.test_weights_in_their_names_compute_the_forward, mlp="swiglu")
FORMS = partial(test_residual.test_scores_and_outputs_follow_from_qk_and_ov, attention="bilinear")
LABELS = partial(test_residual.test_each_part_is_what_its_label_says, config=test_residual.CONFIGS["bilinear bilinear"])
FAULTS = {
    "QK transposed": (weights, "FactoredMatrix(self.W_Q, self.W_K.mT)", "FactoredMatrix(self.W_K, self.W_Q.mT)", FORMS),
    "QK2 transposed": (
        weights,
        "FactoredMatrix(self.W_Q2, self.W_K2.mT)",
        "FactoredMatrix(self.W_K2, self.W_Q2.mT)",
        FORMS,
    ),
    "QK2 of the first pair": (weights, "(self.W_Q2, self.W_K2.mT)", "(self.W_Q, self.W_K.mT)", FORMS),
    "OV without the share of the values": (
        weights,
        "self.own_share()[:, None, None, None] * self.W_V",
        "self.W_V",
        FORMS,
    ),
    "OV_first of each layer's own values": (weights, "w_v[:1], self.W_O", "w_v, self.W_O", FORMS),
    "W_in for W_gate": (weights, "return self.w_l.mT if self.gated else None", "return self.w_r.mT", NAMES),
    "heads of W_O in reverse": (
        weights,
        '"m (h d) -> h d m", h=self.n_head)',
        '"m (h d) -> h d m", h=self.n_head).flip(0)',
        NAMES,
    ),
    "heads in reverse": (
        residual,
        "enumerate(self._result(i).unbind(-2))",
        "enumerate(self._result(i).flip(-2).unbind(-2))",
        test_residual.test_parts_are_labelled_by_their_own_weights,
    ),
    "units in reverse": (
        residual,
        "units.unbind(-2), strict=True)",
        "units.flip(-2).unbind(-2), strict=True)",
        test_residual.test_parts_are_labelled_by_their_own_weights,
    ),
    "labels of attention and MLP": (
        residual,
        'parts[f"{i}_mlp_out"] = writes[i] * self["mlp_out", i]',
        'parts[f"{i}_mlp_out"] = writes[i] * self["attn_out", i]',
        LABELS,
    ),
    "layers counted from the end, off by one": (
        activations,
        "layer + self.model.config.n_layer if layer < 0",
        "layer + self.model.config.n_layer - 1 if layer < 0",
        test_residual.test_shorthand_reaches_every_point,
    ),
    "loss of the last token's logits": (
        hooked_module,
        "F.cross_entropy(logits[:, :-1].mT",
        "F.cross_entropy(logits[:, 1:].mT",
        test_hooked.test_gradients_are_those_of_autograd,
    ),
}

test_fault_is_noticed = each_is_noticed(FAULTS)
