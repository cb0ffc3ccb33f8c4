"""Longspan's attention in models of Hugging Face's transformers, with weights drawn at random."""

import copy
import pickle

import pytest
import torch
import transformers
from agreement import learned
from longspan.transformers import StateCache, register

register("longspan")
register("longspan-decay", decay=0.9, feature_map="softplus")
register("longspan-softmax", "softmax")


def model(name="longspan", **options):
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=None, attn_implementation=name, initializer_range=0.3, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def greedy(llama, ids, count, attention_mask=None):
    """By whole forward passes."""
    for _ in range(count):
        more = {} if attention_mask is None else {"attention_mask": attention_mask}
        if attention_mask is not None:
            more["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)
            attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(ids), 1)], 1)
        logits = llama(ids, use_cache=False, **more).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("cache", [StateCache, transformers.DynamicCache])
@pytest.mark.parametrize("name", ["longspan", "longspan-decay"])
@torch.no_grad()
def test_generate_is_the_full_forward(name, cache):
    llama = model(name)
    ids = torch.randint(2, 50, (2, 9))
    got = llama.generate(ids, max_new_tokens=12, do_sample=False, past_key_values=cache())
    assert torch.equal(got, greedy(llama, ids, 12))


@torch.no_grad()
def test_padding_on_the_left():
    llama = model()
    ids = torch.randint(2, 50, (2, 9))
    ids[0, :4] = 0
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    got = llama.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, past_key_values=StateCache())
    assert torch.equal(got, greedy(llama, ids, 8, mask))
    alone = llama.generate(ids[:1, 4:], max_new_tokens=8, do_sample=False, past_key_values=StateCache())
    assert torch.equal(got[:1, 4:], alone)


@torch.no_grad()
def test_softmax_is_that_of_transformers():
    llama = model("longspan-softmax")
    ids, mask = torch.randint(2, 50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    got = llama(ids, attention_mask=mask).logits
    llama.set_attn_implementation("sdpa")
    wanted = llama(ids, attention_mask=mask).logits
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[1, :6], wanted[1, :6], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_beams():
    llama = model()
    ids = torch.randint(2, 50, (2, 7))
    options = {"num_beams": 3, "max_new_tokens": 10, "do_sample": False}
    got = llama.generate(ids, past_key_values=StateCache(), **options)
    assert torch.equal(got, llama.generate(ids, past_key_values=transformers.DynamicCache(), **options))


@torch.no_grad()
def test_several_continuations_of_a_prompt():
    llama, ids, cache = model(), torch.randint(2, 50, (2, 7)), StateCache()
    llama(ids[:, :6], past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match=r"expected states of as many sequences as the batch, 6, got 2; .*batch_repeat_interleave\(n\)"):
        llama(ids[:, 6:].repeat_interleave(3, 0), past_key_values=cache, use_cache=True)
    cache = StateCache()
    llama(ids[:, :6], past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(3)
    cache = pickle.loads(pickle.dumps(cache))
    got = llama(ids[:, 6:].repeat_interleave(3, 0), past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(got, llama(ids).logits[:, 6:].repeat_interleave(3, 0), rtol=1e-4, atol=1e-4)
    cache = copy.deepcopy(StateCache())
    assert cache.first(1)[0].owner is cache


@torch.no_grad()
def test_a_compiled_model_wants_a_mask():
    llama, ids = model(), torch.randint(2, 50, (2, 9))
    compiled = torch.compile(llama, backend="aot_eager", fullgraph=True)
    exported = torch.export.export(llama, (), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}).module()
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    for mask in (torch.ones_like(ids), padded):
        expected = llama(ids, attention_mask=mask).logits[mask.bool()]
        for way in (compiled, exported):
            got = way(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="a compiled or exported model has to be given an attention_mask"):
        torch.compile(llama, backend="aot_eager")(ids, use_cache=False)


def test_it_learns():
    llama = model().train()
    ids = torch.randint(2, 50, (4, 16))
    losses = learned(llama.parameters(), lambda: llama(ids, labels=ids).loss, 30)
    assert losses[-1] < losses[0] / 4


@torch.no_grad()
def test_an_encoder_sees_both_ways():
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        attn_implementation="longspan-softmax",
    )  # fmt: skip
    bert = transformers.BertModel(config).eval()
    ids, mask = torch.randint(2, 50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    got = bert(ids, attention_mask=mask).last_hidden_state
    bert.set_attn_implementation("sdpa")
    wanted = bert(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(got[mask.bool()], wanted[mask.bool()], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_folder_keeps_the_attention(tmp_path):
    llama = model()
    ids = torch.randint(2, 50, (1, 9))
    llama.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="longspan").eval()
    torch.testing.assert_close(again(ids).logits, llama(ids).logits)


@torch.no_grad()
def test_what_is_refused():
    with pytest.raises(ValueError, match="register: mechanism: expected one of kernelized, softmax, got 'shaw'"):
        register("other", "shaw")
    for options in ({"feature": "relu"}, {"state": None}, {"scale": 1.0}):
        with pytest.raises(TypeError, match="register: .*: expected an option of kernelized_attention_step"):
            register("other", **options)
    ids = torch.randint(2, 50, (1, 9))
    with pytest.raises(ValueError, match=r"longspan: attention_mask: expected shape \(batch, tokens\)"):
        model()(ids, attention_mask=torch.ones(1, 1, 9, 9))
    with pytest.raises(ValueError, match="longspan: cu_seq_lens_q: expected None"):
        model()(ids, cu_seq_lens_q=torch.tensor([0, 4, 9]), cu_seq_lens_k=torch.tensor([0, 4, 9]))
    mistral = transformers.MistralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        sliding_window=4, attn_implementation="longspan",
    )  # fmt: skip
    with pytest.raises(ValueError, match="longspan: attention_mask: expected a causal mask"):
        transformers.MistralForCausalLM(mistral)(ids)
    cache = StateCache()
    model()(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="StateCache.crop: tokens_to_remove: expected 0"):
        cache.crop(1)
    with pytest.raises(ValueError, match=r"longspan: attention_mask: expected shape \(1, 18\), tokens that a cache holds included, got \(1, 9\)"):
        model()(ids, attention_mask=torch.ones(1, 9), past_key_values=cache)


@pytest.mark.parametrize("name", ["longspan", "longspan-softmax"])
def test_a_cache_of_places_that_are_not_written_is_refused(name):
    llama, ids = model(name), torch.randint(2, 50, (1, 9))
    with pytest.raises(ValueError, match="StaticCache.*StateCache"):
        llama.generate(ids, max_new_tokens=6, do_sample=False, cache_implementation="static", disable_compile=True)


def test_a_cache_of_states_wants_an_attention_that_takes_them_up():
    ids, options = torch.randint(2, 50, (1, 9)), {"max_new_tokens": 6, "do_sample": False}
    with pytest.raises(ValueError, match="StateCache: attention: expected one of longspan.transformers.register"):
        model("sdpa").generate(ids, past_key_values=StateCache(), **options)
    # A model that changes the keys after the cache gave them back.
    config = transformers.JetMoeConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8,
                                       intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0,
                                       eos_token_id=None, bos_token_id=1)  # fmt: skip
    jet = transformers.JetMoeForCausalLM(config).eval()
    jet.set_attn_implementation("longspan")
    with torch.no_grad():
        assert jet(ids).logits.isfinite().all()
    with pytest.raises(ValueError, match="keys that are not those that the cache returned"):
        jet.generate(ids, past_key_values=StateCache(), **options)


@torch.no_grad()
def test_the_mask_says_whether_a_model_is_causal():
    """Here the decoder's modules say that they are not."""
    config = transformers.BigBirdPegasusConfig(vocab_size=50, d_model=32, decoder_layers=1, decoder_ffn_dim=48, decoder_attention_heads=4,
                                               max_position_embeddings=16, init_std=0.3)  # fmt: skip
    bird = transformers.BigBirdPegasusForCausalLM._from_config(config, attn_implementation="eager").eval()
    ids, mask = torch.randint(3, 50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    wanted = [bird(ids, attention_mask=one).logits[mask.bool()] for one in (None, mask)]
    bird.set_attn_implementation("longspan-softmax")
    for one, right in zip((None, mask), wanted):
        torch.testing.assert_close(bird(ids, attention_mask=one).logits[mask.bool()], right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name, message", [
    ("DiffLlama", "expected one attention to the keys that a StateCache returned"),
    ("OlmoHybrid", "expected attention in every layer, got a model with linear layers"),
])  # fmt: skip
def test_models_that_states_do_not_fit_are_refused(name, message):
    config = getattr(transformers, f"{name}Config")(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
                                                    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)  # fmt: skip
    one = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="longspan").eval()
    with pytest.raises(ValueError, match=message):
        one.generate(torch.randint(2, 50, (1, 9)), max_new_tokens=4, past_key_values=StateCache())


def test_smoothed_labels_are_shifted(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from longspan.transformers import LongspanConfig, LongspanForCausalLM

    data = [{"input_ids": torch.randint(4, 40, (12,), generator=torch.Generator().manual_seed(i))} for i in range(8)]

    def collate(rows):
        ids = torch.stack([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": ids}

    def change(smoothing):
        torch.manual_seed(0)
        model = LongspanForCausalLM(LongspanConfig(layers=1, d_model=16, heads=2, d_ff=32, vocab_size=40))
        before = [weight.detach().clone() for weight in model.parameters()]
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=8, max_steps=1, learning_rate=0.5, lr_scheduler_type="constant", optim="sgd",
            max_grad_norm=0, label_smoothing_factor=smoothing, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
            logging_strategy="no", remove_unused_columns=False,
        )  # fmt: skip
        Trainer(model, arguments, data_collator=collate, train_dataset=data).train()
        return torch.cat([(weight.detach() - old).flatten() for weight, old in zip(model.parameters(), before)])

    assert torch.cosine_similarity(change(0.0), change(1e-3), 0) > 0.999
