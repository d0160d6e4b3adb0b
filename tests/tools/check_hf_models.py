#!/usr/bin/env python3
"""Checks millrace against the transformers library: small models with random weights, one for each model type and switch.

  python3 tests/tools/check_hf_models.py [NAME...]      from the project's root, after `make`; needs torch and transformers

Prints a line a case: the largest error of the prompts' logprobs in exact mode (at most 2e-3), and greedy tokens that differ.
Some cases must be refused; some differ since the library's eager path counts ALiBi twice (falcon_old: ATTN=sdpa is right).
Not part of `make test`: the library is large. Run it after a change of src/arch.c, src/config_hf.c or src/names.c.
"""
import json, math, os, shutil, subprocess, sys, tempfile, warnings
import torch
warnings.filterwarnings("ignore")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, CONFIG_MAPPING
torch.set_num_threads(2)
BIN = os.path.abspath("build/millrace")
WORK = tempfile.mkdtemp(prefix="millrace-models-")
moe=dict(num_experts=6,num_local_experts=6,num_experts_per_tok=2,moe_intermediate_size=32,n_routed_experts=6)
N=dict(num_key_value_heads=None,head_dim=None,intermediate_size=None)
mla=dict(first_k_dense_replace=1,n_shared_experts=1,q_lora_rank=24,kv_lora_rank=16,qk_nope_head_dim=16,qk_rope_head_dim=8,v_head_dim=16,num_key_value_heads=4,head_dim=8)
moeN=dict(num_local_experts=6,num_experts=6,num_experts_per_tok=2)
CASES={
 'llama':('llama',{}), 'mistral':('mistral',dict(sliding_window=24)), 'mistral_nw':('mistral',dict(sliding_window=None)), 'ministral':('ministral',dict(sliding_window=24,layer_types=['full_attention','sliding_attention','sliding_attention'])),
 'seed_oss':('seed_oss',dict(attention_bias=True,attention_out_bias=False)), 'cwm':('cwm',dict(sliding_window=24,layer_types=['full_attention','sliding_attention','sliding_attention'])),
 'qwen2_sw':('qwen2',dict(use_sliding_window=True,sliding_window=24,max_window_layers=1)),
 'gemma2':('gemma2',dict(sliding_window=24,query_pre_attn_scalar=24)), 'phi':('phi',dict(num_key_value_heads=4,qk_layernorm=False)), 'phi_qk':('phi',dict(num_key_value_heads=4,qk_layernorm=True)),
 'falcon_old':('falcon',dict(N,alibi=True,multi_query=False,new_decoder_architecture=False,parallel_attn=False,bias=True)),
 'falcon_7b':('falcon',dict(N,alibi=False,multi_query=True,new_decoder_architecture=False,parallel_attn=True,bias=False)),
 'falcon_seq':('falcon',dict(N,alibi=False,multi_query=True,new_decoder_architecture=False,parallel_attn=False,bias=True)),
 'falcon_new1':('falcon',dict(N,alibi=False,num_kv_heads=2,new_decoder_architecture=True,num_ln_in_parallel_attn=1)),
 'gpt_neox_seq':('gpt_neox',dict(num_key_value_heads=None,head_dim=None,use_parallel_residual=False)),
 'gpt_bigcode':('gpt_bigcode',dict(intermediate_size=None,n_embd=64,n_head=4,n_layer=3,n_positions=128,n_inner=96,multi_query=True)),
 'gpt_bigcode_mha':('gpt_bigcode',dict(n_embd=64,n_head=4,n_layer=3,n_positions=128,n_inner=96,multi_query=False)),
 'stablelm':('stablelm',dict(use_qkv_bias=True)), 'stablelm_qk':('stablelm',dict(qk_layernorm=True)), 'stablelm_par':('stablelm',dict(use_parallel_residual=True)),
 'olmo2':('olmo2',{}), 'olmo3':('olmo3',dict(sliding_window=24)), 'olmo_clip':('olmo',dict(clip_qkv=0.7)),
 'arcee':('arcee',{}), 'ernie4_5_bias':('ernie4_5',dict(use_bias=True)),
 'olmoe':('olmoe',dict(moeN,norm_topk_prob=True)), 'granitemoeshared':('granitemoeshared',dict(moeN,shared_intermediate_size=48)),
 'deepseek_v2':('deepseek_v2',dict(moe,first_k_dense_replace=1,n_shared_experts=1,q_lora_rank=24,kv_lora_rank=16,qk_nope_head_dim=16,qk_rope_head_dim=8,v_head_dim=16,topk_method='greedy',n_group=None,topk_group=None,num_key_value_heads=4,head_dim=8)),
 'deepseek_v2_grp':('deepseek_v2',dict(moe,first_k_dense_replace=1,n_shared_experts=2,q_lora_rank=None,kv_lora_rank=16,qk_nope_head_dim=16,qk_rope_head_dim=8,v_head_dim=16,topk_method='group_limited_greedy',n_group=3,topk_group=2,num_key_value_heads=4,head_dim=8,routed_scaling_factor=2.0)),
 'glm4':('glm4',{}), 'glm4_moe':('glm4_moe',dict(moe,n_shared_experts=1,first_k_dense_replace=1,n_group=1,topk_group=1,use_qk_norm=True,attention_bias=True)),
 'dots1':('dots1',dict(moe,n_shared_experts=1,first_k_dense_replace=1,n_group=1,topk_group=1,layer_types=['full_attention']*3)),
 'ernie4_5_moe':('ernie4_5_moe',dict(moe,moe_num_experts=6,moe_k=2,moe_num_shared_experts=1,moe_layer_start_index=1)),
 'hunyuan_v1_moe':('hunyuan_v1_moe',dict(moeN,moe_topk=[2,2,2],num_experts=6,use_mixed_mlp_moe=True,num_shared_expert=[1,1,1])),
 'biogpt':('biogpt',dict(num_key_value_heads=None,head_dim=None,hidden_act='gelu')), 'openai-gpt':('openai-gpt',dict(N,n_embd=64,n_head=4,n_layer=3,n_positions=128)),
 'helium':('helium',{}), 'vaultgemma':('vaultgemma',dict(sliding_window=24,query_pre_attn_scalar=24)), 'flex_olmo':('flex_olmo',dict(moeN)),
 'codegen':('codegen',dict(N,n_embd=64,n_head=4,n_layer=3,n_positions=128,rotary_dim=8,n_inner=96)),
 'opt':('opt',dict(N,ffn_dim=96,word_embed_proj_dim=64)), 'opt_proj':('opt',dict(N,ffn_dim=96,word_embed_proj_dim=32,do_layer_norm_before=False)),
 'gptj':('gptj',dict(N,n_embd=64,n_head=4,n_layer=3,n_positions=128,rotary_dim=8)),
 'gpt2_scale':('gpt2',dict(N,n_embd=64,n_head=4,n_layer=3,n_positions=128,scale_attn_by_inverse_layer_idx=True)),
 'gemma3_text':('gemma3_text',dict(sliding_window=24)), 'exaone4':('exaone4',dict(sliding_window=24,sliding_window_pattern=2)),
 'mpt':('mpt',dict(N,d_model=64,n_heads=4,n_layers=3,max_seq_len=128)),
 'mpt_noalibi':('mpt',dict(N,d_model=64,n_heads=4,n_layers=3,max_seq_len=128,attn_config=dict(alibi=False))),
 'starcoder2':('starcoder2',dict(sliding_window=24)), 'nemotron':('nemotron',{}), 'phimoe':('phimoe',dict(moeN,attention_bias=True,lm_head_bias=True)),
 'qwen2_moe':('qwen2_moe',dict(moe,shared_expert_intermediate_size=48,decoder_sparse_step=2,mlp_only_layers=[0])),
 'qwen3_moe':('qwen3_moe',dict(moe,mlp_only_layers=[1])),
 'deepseek_v3':('deepseek_v3',dict(moe,num_experts=None,num_local_experts=None,n_routed_experts=8,first_k_dense_replace=1,n_shared_experts=1,q_lora_rank=24,kv_lora_rank=16,qk_nope_head_dim=16,qk_rope_head_dim=8,v_head_dim=16,n_group=4,topk_group=2,num_key_value_heads=4,head_dim=8)),
 'apertus':('apertus',{}), 'bitnet':('bitnet',{}), 'bloom':('bloom',dict(N,n_head=4,n_layer=3)), 'cohere':('cohere',{}), 'cohere_qk':('cohere',dict(use_qk_norm=True)), 'cohere2':('cohere2',dict(sliding_window=24,layer_types=['sliding_attention','full_attention','sliding_attention'])),
 'glm':('glm',{}), 'granite':('granite',dict(embedding_multiplier=2.0,attention_multiplier=0.2,residual_multiplier=0.6,logits_scaling=3.0)), 'smollm3':('smollm3',{}),
 'minimax_m2':('minimax_m2',dict(moeN)), 'gpt_neo':('gpt_neo',dict(N,num_hidden_layers=None,num_layers=2,num_heads=4,attention_types=[[['global','local'],1]],attention_layers=None,window_size=24,intermediate_size=96)),
 'hunyuan_dense':('hunyuan_v1_dense',{}), 'phi3':('phi3',dict(sliding_window=24)), 'phi3_partial':('phi3',dict(partial_rotary_factor=0.5)),
 'mixtral_sw':('mixtral',dict(moeN,sliding_window=24)),

 'exaone':('exaone',{}), 'internlm3':('internlm3',dict(attention_bias=True,mlp_bias=True)), 'iquestcoder':('iquestcoder',{}), 'jais2':('jais2',{}),
 'persimmon':('persimmon',dict(num_key_value_heads=None,head_dim=None,qk_layernorm=True)), 'persimmon_n':('persimmon',dict(num_key_value_heads=None,head_dim=None,qk_layernorm=False)),
 'solar_open':('solar_open',dict(moe,n_shared_experts=1,n_group=1,topk_group=1,intermediate_size=None)),
 'sarvam_moe':('sarvam_moe',dict(moe,n_shared_experts=1,first_k_dense_replace=1,n_group=1,topk_group=1)),
 'hy_v3':('hy_v3',dict(moe,num_shared_experts=1,mlp_layer_types=['dense','sparse','sparse'])),
 'exaone_moe':('exaone_moe',dict(moe,num_shared_experts=1,n_group=1,topk_group=1,sliding_window=24,sliding_window_pattern=2,mlp_layer_types=['dense','sparse','sparse'])),
 'flint':('flint',dict(moe,shared_expert_intermediate_size=48,sliding_window=24,layer_types=['sliding_attention','full_attention','sliding_attention'])),
 'mellum':('mellum',dict(moe,sliding_window=24,layer_types=['sliding_attention','full_attention','sliding_attention'])),
 'glm4_moe_lite':('glm4_moe_lite',dict(moe,**mla,n_group=1,topk_group=1)), 'axk1':('axk1',dict(moe,**mla,n_group=1,topk_group=1)), 'sarvam_mla':('sarvam_mla',dict(moe,**mla)),
 'youtu':('youtu',dict(q_lora_rank=24,kv_lora_rank=16,qk_nope_head_dim=16,qk_rope_head_dim=8,v_head_dim=16,num_key_value_heads=4,head_dim=8)),
 'deepseek_v3_ni':('deepseek_v3',dict(moe,**mla,n_group=1,topk_group=1,rope_interleave=False)),
 'deepseek_v3_bias':('deepseek_v3',dict(moe,**mla,n_group=1,topk_group=1,attention_bias=True)),
 'minicpm3':('minicpm3',dict(q_lora_rank=24,kv_lora_rank=16,qk_nope_head_dim=16,qk_rope_head_dim=8,v_head_dim=16,num_key_value_heads=4,head_dim=8,dim_model_base=32)),
 'hyperclovax':('hyperclovax',dict(use_post_norm=True,logits_scaling=0.5,residual_multiplier=0.7,attention_multiplier=0.2,embedding_multiplier=2.0)),
 'ministral3':('ministral3',dict(sliding_window=None,rope_parameters=dict(rope_type='yarn',factor=4.0,original_max_position_embeddings=32,rope_theta=1e4,llama_4_scaling_beta=0.3,beta_fast=32.0,beta_slow=1.0,mscale=1.0,mscale_all_dim=1.0))),
 'granitemoe_swa':('granitemoe_swa',dict(moeN,sliding_window=24,layer_types=['full_attention','sliding_attention','sliding_attention'],layer_rope_theta=[5e4,1e4,0],shared_intermediate_size=48)),
 'aria_text':('aria_text',dict(moe_num_experts=6,moe_topk=2,moe_num_shared_experts=2)), 'ctrl':('ctrl',dict(N,n_embd=64,n_head=4,n_layer=3,n_positions=128,dff=96)),
 'granitehybrid':('granitemoehybrid',dict(num_local_experts=0,shared_intermediate_size=80,position_embedding_type='rope',layer_types=['full_attention']*3,mamba_n_heads=4)),
 'granitehybrid_moe':('granitemoehybrid',dict(moeN,shared_intermediate_size=80,layer_types=['full_attention']*3,mamba_n_heads=4)),
 'granitehybrid_mamba':('granitemoehybrid',dict(moeN,shared_intermediate_size=80,layer_types=['full_attention','linear_attention','full_attention'],mamba_n_heads=4)),
 'apertus1p5_text':('apertus1p5_text',{}),
 'cohere2_moe_avg':('cohere2_moe',dict(num_experts=6,num_experts_per_tok=2,num_shared_experts=2,sliding_window=24,first_k_dense_replace=1,prefix_dense_intermediate_size=80)),
 'cohere2_moe_sig':('cohere2_moe',dict(num_experts=6,num_experts_per_tok=2,num_shared_experts=1,sliding_window=24,shared_expert_combination_strategy='sum',expert_selection_fn='sigmoid',norm_topk_prob=False)),
 'cohere2_moe_rms':('cohere2_moe',dict(num_experts=6,num_experts_per_tok=2,sliding_window=24,rms_norm_eps=1e-6)),
 'granite_swa':('granite_swa',dict(sliding_window=24)), 'cohere2_moe':('cohere2_moe',dict(moeN,sliding_window=24)), 'kolibri1':('kolibri1',dict(moe,shared_expert_intermediate_size=48,sliding_window=24)),
 'nanochat':('nanochat',{}), 'xglm':('xglm',dict(N,d_model=64,ffn_dim=96,num_layers=3,attention_heads=4,hidden_size=None,num_hidden_layers=None,num_attention_heads=None)), 'gpt-sw3':('gpt-sw3',dict(N,n_embd=64,n_head=4,n_layer=3,n_positions=128)),
 'gpt_neox_japanese':('gpt_neox_japanese',dict(N,intermediate_multiple_size=2)), 'dbrx':('dbrx',dict(N,d_model=64,n_heads=4,n_layers=3,max_seq_len=128,attn_config=dict(kv_n_heads=2,clip_qkv=0.8,rope_theta=1e4),ffn_config=dict(ffn_hidden_size=48,moe_num_experts=6,moe_top_k=2,hidden_size=64),hidden_size=None,num_hidden_layers=None,num_attention_heads=None)),
 'granitemoe_bias':('granitemoe',dict(moeN,attention_bias=True)), 'llama_bias':('llama',dict(attention_bias=True,mlp_bias=True)), 'qwen3_sw':('qwen3',dict(use_sliding_window=True,sliding_window=24,max_window_layers=1,attention_bias=True)),
 'gemma':('gemma',{}), 'glm_nobias':('glm',dict(attention_bias=False)), 'cohere2_nosw':('cohere2',dict(sliding_window=200)), 'hunyuan_noqk':('hunyuan_v1_dense',dict(use_qk_norm=False)),
 'llama_lin':('llama',dict(rope_parameters=dict(rope_type='linear',factor=2.0,rope_theta=1e4))), 'llama_dyn':('llama',dict(rope_parameters=dict(rope_type='dynamic',factor=2.0,rope_theta=1e4))), 'llama_l3':('llama',dict(rope_parameters=dict(rope_type='llama3',factor=8.0,low_freq_factor=1.0,high_freq_factor=4.0,original_max_position_embeddings=32,rope_theta=1e4))),
 'llama_yarn':('llama',dict(rope_parameters=dict(rope_type='yarn',factor=4.0,original_max_position_embeddings=32,rope_theta=1e4))),
 'llama_prop':('llama',dict(rope_parameters=dict(rope_type='proportional',rope_theta=1e4,partial_rotary_factor=0.5))),
 'llama_partial':('llama',dict(rope_parameters=dict(rope_type='default',rope_theta=1e4,partial_rotary_factor=0.5))),
 'opt_relu':('opt',dict(N,ffn_dim=96,word_embed_proj_dim=64,activation_function='gelu',enable_bias=False,layer_norm_elementwise_affine=False)),
 'stablelm_seqb':('stablelm',dict(use_parallel_residual=False,use_qkv_bias=False)), 'phi3_lr':('phi3',dict(max_position_embeddings=128,original_max_position_embeddings=32,rope_parameters=dict(rope_type='longrope',rope_theta=1e4,short_factor=[1.0+0.1*i for i in range(8)],long_factor=[2.0+0.3*i for i in range(8)]))),
 'olmoe_clip':('olmoe',dict(moeN,clip_qkv=0.7)), 'gptneox_bias':('gpt_neox',dict(N,attention_bias=False)), 'bloom_post':('bloom',dict(N,n_head=4,n_layer=3,apply_residual_connection_post_layernorm=True)),
 'gpt2_cross':('gpt2',dict(N,n_embd=64,n_head=4,n_layer=3,n_positions=128,scale_attn_weights=False)), 'qwen3_moe_nn':('qwen3_moe',dict(moe,norm_topk_prob=False)), 'nemotron_b':('nemotron',dict(attention_bias=True,mlp_bias=True)),
}

BASE=dict(vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
  max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
# models of images and text, of which the text part runs
vis=dict(hidden_size=32,intermediate_size=48,num_hidden_layers=1,num_attention_heads=2,image_size=28,patch_size=14)
T=lambda **more: dict(BASE,**more)
rope=dict(rope_type='default',rope_theta=1e4,mrope_section=[2,3,3])
CASES.update({
 'gemma3_vl':('gemma3',dict(text_config=T(model_type='gemma3_text',sliding_window=24),vision_config=dict(vis,model_type='siglip_vision_model'),mm_tokens_per_image=4,image_token_index=150,boi_token_index=151,eoi_token_index=152)),
 'mistral3_vl':('mistral3',dict(text_config=T(model_type='mistral',sliding_window=None),vision_config=dict(vis,model_type='pixtral',head_dim=16),image_token_index=150)),
 'llava':('llava',dict(text_config=T(model_type='llama'),vision_config=dict(vis,model_type='clip_vision_model'),image_token_index=150)),
 'fuyu':('fuyu',dict(text_config=T(model_type='persimmon',num_key_value_heads=4,qk_layernorm=True),patch_size=4,num_channels=1,image_size=28,vocab_size=160,hidden_size=64,intermediate_size=96,num_hidden_layers=3,num_attention_heads=4)),
 'qwen2_vl':('qwen2_vl',dict(text_config=T(rope_parameters=rope),vision_config=dict(depth=1,embed_dim=32,hidden_size=64,mlp_ratio=2,num_heads=2))),
 'qwen2_5_vl':('qwen2_5_vl',dict(text_config=T(rope_parameters=rope),vision_config=dict(depth=1,hidden_size=32,intermediate_size=48,num_heads=2,out_hidden_size=64))),
 'qwen3_vl':('qwen3_vl',dict(text_config=T(rope_parameters=dict(rope,mrope_interleaved=True)),vision_config=dict(depth=1,hidden_size=32,intermediate_size=48,num_heads=2,out_hidden_size=64,num_position_embeddings=16,deepstack_visual_indexes=[0]))),
})
def new_model(cfg):
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        try: return auto.from_config(cfg, attn_implementation=os.environ.get("ATTN","eager"))
        except ValueError as e: why=e
    raise why
def build(mt, over, name):
    cls=CONFIG_MAPPING[mt]
    kw=dict() if 'text_config' in over else dict(BASE)
    kw.update(over)
    kw={k:v for k,v in kw.items() if v is not None}
    cfg=cls(**kw)
    torch.manual_seed(1)
    m=new_model(cfg).eval().float()
    g=torch.Generator().manual_seed(5)
    with torch.no_grad():
        for n,p in m.named_parameters():
            if p.dim()>=2:
                p.copy_(torch.randn(p.shape,generator=g)*(1.3/math.sqrt(p.shape[-1])))
            elif 'norm' in n or 'ln' in n:
                if n.endswith('bias'): p.copy_(torch.randn(p.shape,generator=g)*0.2)
                else: p.add_(torch.randn(p.shape,generator=g)*0.2)
            else: p.add_(torch.randn(p.shape,generator=g)*0.2)
        for n,b in m.named_buffers():
            if 'correction' in n: b.copy_(torch.randn(b.shape,generator=g)*0.1)
    d=f"{WORK}/{name}"
    shutil.rmtree(d,ignore_errors=True)
    m.save_pretrained(d)
    return m,cfg,d
def check(mt, over, name, lens=(1,17,60,100), tol=2e-3):
    try:
        m,cfg,d=build(mt,over,name)
    except Exception as e:
        return f"BUILD {type(e).__name__}: {str(e)[:200]}"
    rows=[];want={}
    g=torch.Generator().manual_seed(9)
    V=min(cfg.get_text_config().vocab_size, 150) if 'text_config' in over else cfg.vocab_size
    try:
      for L in lens:
        ids=torch.randint(3,V,(1,L),generator=g)
        with torch.no_grad(): lo=m(ids,use_cache=False).logits[0].double()
        lp=torch.log_softmax(lo,-1)
        want[f"r{L}"]=([None]+[lp[t,ids[0,t+1]].item() for t in range(L-1)], int(lo[-1].argmax()), float(lo[-1].topk(2).values.diff().abs()))
        rows.append({"id":f"r{L}","prompt":ids[0].tolist(),"max_tokens":1,"temperature":0,"ignore_eos":True,"return_token_ids":True,"prompt_logprobs":0})
    except Exception as e:
        return f"FORWARD {type(e).__name__}: {str(e)[:200]}"
    src=f"{WORK}/{name}.jsonl"; out=f"{WORK}/{name}.out.jsonl"
    open(src,"w").write("".join(json.dumps(r)+"\n" for r in rows))
    for f in os.listdir(WORK):
        if f.startswith(name+".out"): 
            p=os.path.join(WORK,f)
            shutil.rmtree(p) if os.path.isdir(p) else os.unlink(p)
    p=subprocess.run([BIN,"run",src,"-m",d,"-o",out,"--compute","exact","--progress","none"],capture_output=True,text=True)
    if p.returncode: return f"RC {p.returncode} {p.stderr.strip()[-300:]}"
    worst=0;bad=0
    got={r["id"]:r for r in map(json.loads,open(out))}
    for k,(lp,top,gap) in want.items():
        for a,b in zip(lp,got[k]["prompt_token_logprobs"]):
            if a is not None: worst=max(worst,abs(a-b))
        if gap>1e-3 and got[k]["token_ids"][0]!=top: bad+=1
    return f"{'ok' if worst<=tol and not bad else 'WRONG'} {worst:.1e} greedy wrong {bad}"

def main():
    bad = 0
    for name, (model_type, over) in CASES.items():
        if sys.argv[1:] and not any(name.startswith(p) for p in sys.argv[1:]):
            continue
        said = check(model_type, over, name)
        bad += said.startswith("WRONG")
        print(f"{name:24} {said}", flush=True)
    shutil.rmtree(WORK)
    sys.exit(bad > 0)


main()
