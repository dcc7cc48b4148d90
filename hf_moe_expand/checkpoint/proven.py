"""The architectures of transformers that kept every promise in the tests, and those that cannot be expanded.

The tests walk the library's own list: a name that is in no table must be refused on a tiny twin.
"""

from typing import Any

# Decoders; those whose layers are all mixtures of experts, beside which only added experts stand; encoder-decoders. A
# model type may be in two tables: its decoder alone is another model.
PROVEN, PROVEN_MIXTURES, PROVEN_ENCODER_DECODERS = map(str.split, (
    """afmoe apertus arcee axk1 axk2 bailing_hybrid beam biogpt bitnet bloom codegen cohere cohere2 ctrl cwm deepseek_v3
    deepseek_v32 diffllama doge ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 flint gemma gemma2
    gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3 gpt2
    gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj granite granite_swa helium hunyuan_v1_dense hy_v3 hy_v4
    hyperclovax internlm3 iquestcoder jais2 laguna lfm2 lfm3 llama mimo_v2_flash minicpm3 ministral ministral3 mistral
    modernbert-decoder mpt nanochat nemotron olmo olmo2 olmo3 olmo_hybrid openai-gpt opt persimmon phi phi3 qwen2
    qwen3 qwen3_5_text recurrent_gemma seed_oss smollm3 stablelm starcoder2 trocr vaultgemma xglm youtu""",
    """aria_text cohere2_moe deepseek_v2 dots1 flex_olmo gpt_oss granitemoe granitemoe_swa granitemoeshared
    hunyuan_v1_moe inkling2_text inkling_text jetmoe kimi_linear kolibri1 lfm2_moe llama4_text mellum minimax_m2
    minimax_m3_vl_text mixtral olmoe phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next solar_open""",
    """bart blenderbot blenderbot-small longt5 m2m_100 marian mbart mt5 mvp nllb-moe pegasus plbart switch_transformers
    t5 umt5""",
))  # fmt: skip

# A tiny twin would not show the reason, or not in words (`promises.py`); where it shows it, no table has the name.
_REASONS = {
    "a mixture whose generation needs a cache of its own": "minimax",
    "a model whose generation with a cache differs from the full forward pass": "cpmant",
    "an encoder, or an encoder that may run as a decoder: two modules share its FFN":
        "bert bert-generation big_bird camembert data2vec-text electra ernie git megatron-bert reformer rembert "
        "roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod",
    "the decoder of an encoder-decoder":
        "bart blenderbot blenderbot-small marian mbart mvp pegasus plbart whisper",
    "an encoder-decoder that pads a text inside its encoder: routers would count the padding":
        "bigbird_pegasus led pegasus_x",
    "an encoder-decoder whose layers take the tokens in another order than the batch": "fsmt",
    "an encoder-decoder that predicts several tokens at once": "prophetnet",
    "an encoder-decoder of two models, each with a configuration of its own": "encoder-decoder t5gemma t5gemma2",
    "a model of images, sound or bytes, alone or around a text decoder":
        "audioflamingo3 blt dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified "
        "gemma4_unified_assistant glmasr got_ocr2 granite_speech granite_speech_plus llama4 mllama moshi "
        "moss_transcribe_diarize musicflamingo musicgen musicgen_melody nemo_speechlm phi4_multimodal qwen2_audio "
        "qwen3_5 qwen3_5_moe qwen3_asr qwen4_exp seamless_m4t seamless_m4t_v2 vibevoice_asr voxtral voxtral_realtime",
}  # fmt: skip
LEFT_OUT = {name: reason for reason, names in _REASONS.items() for name in names.split()}


def is_proven(config: Any) -> bool:
    """Whether the architecture of a dense configuration was proven to keep every promise."""
    known = PROVEN_ENCODER_DECODERS if config.is_encoder_decoder else (*PROVEN, *PROVEN_MIXTURES)
    return config.model_type in known
