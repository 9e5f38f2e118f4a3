package redact_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/redact"
)

// flagsOfTraining are options of training programs, from their documentation and
// examples. None is a secret.
var flagsOfTraining = map[string]string{
	"Transformers": `--tokenizer_name gpt2
		--use_fast_tokenizer True
		--use_auth_token True
		--token True
		--hub_strategy every_save
		--hub_model_id me/model-7b
		--hub_private_repo True
		--include_tokens_per_second True
		--include_num_input_tokens_seen non_padding
		--average_tokens_across_devices True
		--max_new_tokens 128
		--max_seq_length 2048
		--text_column article
		--pad_token_id 0
		--label_names labels`,
	"TRL": `--chosen_key chosen
		--rejected_key rejected
		--dataset_text_field text
		--max_prompt_length 512
		--stop_token eos
		--stop_token_id 2
		--eos_token <|im_end|>
		--pad_token <|endoftext|>
		--label_pad_token_id -100
		--missing_eos_penalty 1.0
		--precompute_ref_log_probs True
		--completion_only_loss True
		--token_dropout 0.1
		--judge pair_rm`,
	"OpenRLHF": `--input_key context_messages
		--output_key completion
		--label_key answer
		--prompt_key prompt
		--use_wandb True
		--wandb_project openrlhf_train_ppo
		--wandb my-run-7
		--packing_samples
		--apply_chat_template`,
	"verl": `data.prompt_key=prompt
		data.reward_fn_key=data_source
		data.image_key=images
		data.video_key=videos
		data.tools_key=tools
		data.return_raw_chat=True
		data.max_response_length=1024
		actor_rollout_ref.rollout.max_num_batched_tokens=8192
		custom_reward_function.name=compute_score`,
	"torchtune": `tokenizer.path=/tmp/Llama-3.2-1B-Instruct/original/tokenizer.model
		tokenizer.max_seq_len=8192
		dataset.column_map.input=prompt
		dataset.column_map.chosen_key=conversations
		tokenizer._component_=torchtune.models.llama3.llama3_tokenizer
		metric_logger.log_dir=/tmp/logs`,
	"nanotron": `tokens.sequence_length=2048
		tokens.micro_batch_size=4
		tokens.num_tokens=1000000000
		tokenizer.tokenizer_name_or_path=HuggingFaceTB/cosmo2-tokenizer
		model.model_config.num_key_value_heads=8
		model.model_config.bos_token_id=1
		--config-file examples/config_tiny_llama.yaml`,
	"Megatron": `--tokenizer-type GPT2BPETokenizer
		--tokenizer-model /models/tokenizer.model
		--moe-token-dispatcher-type alltoall
		--moe-token-drop-policy probs
		--json-keys text
		--kv-channels 128
		--num-query-groups 8
		--vocab-extra-ids 100
		--special-tokens [PAD]
		--split 969,30,1
		--key-value-channels 64
		--num-tokens 300000000`,
	"others": `--key-frames 10
		--tokenizer moses
		--max_tokens 4096
		--num_tokens 1024
		--tokens-per-sample 512
		--csv-img-key filepath
		--csv-caption-key title
		--metric_key eval_loss
		--monitor_key val/loss
		--sort_key length
		--group_by_key source
		--rng_key 42
		--prng-key 20240131
		--seed_key 12345678
		--cls_token [CLS]
		--blank_token <blk>
		--assistant_token ASSISTANT:
		--user_token USER:
		--sos_token <sos/eos>
		--noise_token noise
		--num_pass 2
		--gradient_bypass x
		--key_padding_mask causal
		OLDPWD=/home/me
		PGPASSFILE=/home/me/.pgpass
		GOOGLE_APPLICATION_CREDENTIALS=/run/gcp.json
		HF_HOME=/data/hf
		HF_TOKEN_PATH=/home/me/.hf
		WANDB_PROJECT=a1b2c3d4
		AWS_PROFILE=research`,
}

// TestFlagsOfTraining checks that the options of training programs stay.
func TestFlagsOfTraining(t *testing.T) {
	t.Parallel()
	for program, flags := range flagsOfTraining {
		for line := range strings.Lines(flags) {
			args := strings.Fields(line)
			if got := (redact.Names{}).Args(args); !slices.Equal(got, args) {
				t.Errorf("%s: %q is recorded as %q", program, args, got)
			}
			if script := []string{"sh", "-c", "exec train " + strings.Join(args, " ")}; !slices.Equal(redact.Names{}.Args(script), script) {
				t.Errorf("%s: the script %q is recorded as %q", program, script[2], redact.Names{}.Args(script)[2])
			}
		}
	}
}

// TestSecretsOfTraining redacts the secrets in command lines of training
// programs. Each line ends with the secret.
func TestSecretsOfTraining(t *testing.T) {
	t.Parallel()
	const (
		hex = "0123456789abcdef0123456789abcdef01234567"
		b64 = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
	)
	for line := range strings.Lines(`PGPASSWORD=hunter
		PGPASSWORD=1234
		MYSQL_PWD=hunter
		MYSQL_PWD=123456
		SSHPASS=hunter
		REDISCLI_AUTH=hunter
		AWS_SECRET_ACCESS_KEY=` + b64 + `
		AWS_SESSION_TOKEN=hunter
		AWS_ACCESS_KEY_ID=AKIAIOSFODNN7EXAMPLE
		HF_TOKEN=hunter
		HUGGING_FACE_HUB_TOKEN=hunter
		HUGGINGFACEHUB_API_TOKEN=hunter
		WANDB_API_KEY=` + hex + `
		COMET_API_KEY=hunter
		NEPTUNE_API_TOKEN=hunter
		MLFLOW_TRACKING_PASSWORD=hunter
		MLFLOW_TRACKING_TOKEN=` + b64 + `
		CLEARML_API_SECRET_KEY=hunter
		OPENAI_API_KEY=hunter
		KAGGLE_KEY=` + hex[:32] + `
		GITHUB_TOKEN=hunter
		GH_TOKEN=hunter
		CI_JOB_TOKEN=` + b64 + `
		AZURE_STORAGE_KEY=hunter
		AZURE_CLIENT_SECRET=hunter
		AZURE_STORAGE_SAS_TOKEN=hunter
		SLACK_BOT_TOKEN=hunter
		SLACK_WEBHOOK=https://hooks.slack.com/services/T000000/B000000/` + hex[:24] + `
		--hub_token hunter
		--token hunter
		--hf-token hunter
		--hf_hub_token hunter
		--huggingface_token hunter
		--wandb_key hunter
		--wandb-token hunter
		--use_wandb ` + hex + `
		--wandb_v1 wandb_v1_` + hex + b64 + `
		--kaggle-api-key hunter
		--api-key token-abc123
		--openai_key hunter
		--judge_key ` + b64 + `
		--team_key 0afae57f3ccfd9d7
		--vendor_token Zf3D0LXCM3EIMbgJpUNnkRtOfOueHznB
		--db-password hunter
		--s3_secret hunter
		--s3-secret-key hunter
		--encryption-key hunter
		--account_key hunter
		logger.wandb.api_key=hunter
		++trainer.hub_token=hunter
		--set=hub_token=hunter
		--env=HF_TOKEN=hunter
		-eMY_PGPASSWORD=hunter`) {
		args := strings.Fields(line)
		last := args[len(args)-1]
		secret := last[strings.LastIndex(last, "=")+1:]
		if got := strings.Join(redact.Names{}.Args(args), " "); strings.Contains(got, secret) || !strings.Contains(got, mark) {
			t.Errorf("%q is recorded as %q", args, got)
		}
		if got := strings.Join(redact.Names{}.Args([]string{"sh", "-c", "exec " + strings.Join(args, " ")}), " "); strings.Contains(got, secret) {
			t.Errorf("the script %q is recorded as %q", line, got)
		}
	}
}
