package redact_test

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/internal/redact"
)

const mark = redact.Mark

func TestArgs(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ args, want []string }{
		{[]string{"python3", "train.py", "--api-key=sk-SECRET", "--lr", "3e-4"}, []string{"python3", "train.py", "--api-key=" + mark, "--lr", "3e-4"}},
		{[]string{"--api-key", "VALUE", "--x"}, []string{"--api-key", mark, "--x"}},
		{[]string{"-token", "VALUE"}, []string{"-token", mark}},
		{[]string{"--api_key=a b=c"}, []string{"--api_key=" + mark}},
		{[]string{"api_key=VALUE"}, []string{"api_key=" + mark}},
		{[]string{"++wandb.api_key=VALUE"}, []string{"++wandb.api_key=" + mark}},
		{[]string{"env", "WANDB_API_KEY=VALUE", "python3"}, []string{"env", "WANDB_API_KEY=" + mark, "python3"}},
		{[]string{"--set=wandb_api_key=VALUE"}, []string{"--set=wandb_api_key=" + mark}},
		{[]string{"--set", `wandb={"project":"x","api_key":"VALUE"}`}, []string{"--set", `wandb={"project":"x","api_key":"` + mark + `"}`}},
		{[]string{"wandb={api_key:VALUE,project:x}"}, []string{"wandb={api_key:" + mark + ",project:x}"}},
		{[]string{"sh", "-c", "export HF_TOKEN=VALUE; python3 t.py --db-password 'a b' --n 3"}, []string{"sh", "-c", "export HF_TOKEN=" + mark + "; python3 t.py --db-password '" + mark + "' --n 3"}},
		{[]string{"sh", "-c", "curl -H 'Authorization: Bearer VALUE' -H \"X-Api-Key: VALUE\" u"}, []string{"sh", "-c", "curl -H 'Authorization: Bearer " + mark + "' -H \"X-Api-Key: " + mark + "\" u"}},
		{[]string{"python3", "-c", `os.environ["OPENAI_API_KEY"] = "VALUE"`}, []string{"python3", "-c", `os.environ["OPENAI_API_KEY"] = "` + mark + `"`}},
		{[]string{"https://user:VALUE@host:8080/p?token=VALUE&x=1"}, []string{"https://" + mark + "@host:8080/p?token=" + mark + "&x=1"}},
		{[]string{"--dsn=postgres://me:p@ss@db/x"}, []string{"--dsn=postgres://" + mark + "@db/x"}},
		{[]string{"DefaultEndpointsProtocol=https;AccountName=a;AccountKey=VALUE==;EndpointSuffix=x"}, []string{"DefaultEndpointsProtocol=https;AccountName=a;AccountKey=" + mark + ";EndpointSuffix=x"}},
		{[]string{"--credentials.user=me", "--auth", "me:VALUE"}, []string{"--credentials.user=" + mark, "--auth", mark}},
		{[]string{"--password", "1234", "--PIN2", "--secret=7"}, []string{"--password", mark, "--PIN2", "--secret=" + mark}},
		{[]string{"env", "PGPASSWORD=VALUE", "MYSQL_PWD=VALUE", "SSHPASS=VALUE", "REDISCLI_AUTH=VALUE"}, []string{"env", "PGPASSWORD=" + mark, "MYSQL_PWD=" + mark, "SSHPASS=" + mark, "REDISCLI_AUTH=" + mark}},
		{[]string{"AWS_SECRET_ACCESS_KEY=VALUE", "AWS_SESSION_TOKEN=VALUE", "HF_TOKEN=VALUE", "--hub_token", "VALUE"}, []string{"AWS_SECRET_ACCESS_KEY=" + mark, "AWS_SESSION_TOKEN=" + mark, "HF_TOKEN=" + mark, "--hub_token", mark}},
		{[]string{"COMET_API_KEY=VALUE", "NEPTUNE_API_TOKEN=VALUE", "MLFLOW_TRACKING_PASSWORD=VALUE", "CLEARML_API_SECRET_KEY=VALUE", "--slack-token=x0VALUE"}, []string{"COMET_API_KEY=" + mark, "NEPTUNE_API_TOKEN=" + mark, "MLFLOW_TRACKING_PASSWORD=" + mark, "CLEARML_API_SECRET_KEY=" + mark, "--slack-token=" + mark}},
		{[]string{"--hf_token", "secret", "--api_key=secret", "OPENAI_API_KEY=secret"}, []string{"--hf_token", mark, "--api_key=" + mark, "OPENAI_API_KEY=" + mark}},
		{[]string{"run", "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"}, []string{"run", mark}},
	} {
		was := slices.Clone(c.args)
		got := redact.Names{}.Args(c.args)
		if !slices.Equal(got, c.want) {
			t.Errorf("%q\nis recorded as %q\nwant           %q", c.args, got, c.want)
		}
		if !slices.Equal(c.args, was) {
			t.Errorf("the arguments %q became %q", was, c.args)
		}
		if again := (redact.Names{}).Args(got); !slices.Equal(again, got) {
			t.Errorf("not idempotent: %q, then %q", got, again)
		}
		if strings.Contains(strings.Join(got, " "), "VALUE") {
			t.Errorf("%q has the secret", got)
		}
	}
}

// Names that look secret but are not.
func TestArgsStay(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"--max-tokens", "512"},
		{"--max_tokens=512", "max_new_tokens=64"},
		{"tokenizer=gpt2", "--tokenizer", "gpt2", "--tokenizer-path=/a/b"},
		{"--num-keys", "4", "--json-keys", "text,title", "special_tokens=thought"},
		{"monkey=1", "--monkey", "see"},
		{"--key-padding", "left", "--key-dim=64", "key_padding_mask=causal"},
		{"--author", "me", "author=me", "--authors=a,b"},
		{"--keyboard", "us", "--turkey=big", "hockey=x"},
		{"--sort-key", "loss", "--image-key=jpg", "data.prompt_key=question", "--text_key", "content"},
		{"--eos-token", "<|endoftext|>", "--pad_token=[PAD]", "--image-token", "img", "unk_token=unk"},
		{"--token", "<s>", "--per-token", "loss", "loss_per_token=1.25"},
		{"--token-file", "/run/secret", "--password-file=/p", "--credentials-file=/c", "--tls-key-file", "k"},
		{"--use-auth-token", "true", "--use_auth_token=True", "--auth=none", "--secret=false"},
		{"--token-type", "bearer", "--auth-mode", "basic", "--secret-name=x"},
		{"--api-key", "$API_KEY", "--token=${HF_TOKEN}", "api_key=${oc.env:KEY}"},
		{"sh", "-c", `python3 t.py --api-key=$KEY --token "$HF_TOKEN" --password $(cat /run/p)`},
		{"--use-auth", "--lr", "3"},
		{"python3", "-c", "print(sorted(x, key=len)); token = words[0]; key == 3; d['key']; def f(token: str): pass"},
		{"--passes", "2", "PWD=/home/me", "--first-pass", "x", "bypass=x"},
		{"git+ssh://git@github.com/x", "abfss://container@account.dfs.core.windows.net/p", "https://host/a@b", "user@host"},
		{"--name", "sk-learn-baseline-2024-12", "task-0123456789abcdefghijklmn", "hf_internal_testing/tiny"},
		// Options of TRL, transformers, torchtune, nanotron, Megatron, Lightning and timm.
		{"--chosen_key", "chosen", "--rejected_key=rejected", "--completion-key", "completion", "--conversation_key=messages"},
		{"--tokens_key=input_ids", "--answer-key", "final_answer", "dataset.context_key=context", "pair_key=doc_id"},
		{"--key-frames", "12", "--keyframe_interval=4", "--token_dropout", "0.1", "--num_tokens=1e9", "--tokens-per-batch", "4096"},
		{"--decoder_start_token_id", "0", "--pad_token_id=0", "--add_eos_token", "--add_bos_token=False", "--mask_token", "<mask>"},
		{"--tokenizer-type", "GPT2BPETokenizer", "--tokenizer-model=/a/tok.model", "--vocab-size", "50257", "--token_weights=1,2"},
		{"--num-query-groups", "8", "--kv-channels=128", "--num_key_value_heads", "8", "key_value_proj_dim=64", "--qk-layernorm"},
		{"--max-tokens-to-oom", "12000", "--tokens_per_sample=2048", "--micro-batch-size=4", "--train-tokens", "300B", "tokens.sequence_length=4096"},
		{"--monitor_key", "val_loss", "--metric-key=accuracy", "checkpoint_key=state_dict", "--model-key", "model_ema", "--state_dict_key=student"},
		{"--report_to", "wandb", "--push_to_hub=false", "--hub_strategy", "every_save", "--hub_model_id=me/model", "--hub_private_repo"},
		{"--reward-token", "plus", "--step_token=step", "--think-end-token", "</think>", "--anchor_key", "anchor", "--positive-key=positive"},
		{"--compass", "n", "--secretary=me", "--credence=x"},
		{"--master-addr=10.0.0.1", "--keep=last=2,best=1:loss:min", "--set=lr=3e-4", "--redact=pin"},
		{"a1b2c3d4e5f60718293a4b5c6d7e8f9001122334", "step-2000.a1", "RUN@best:loss:min"},
		{"", "=", "--", "-", "--=", "key"},
	} {
		if got := (redact.Names{}).Args(args); !slices.Equal(got, args) {
			t.Errorf("%q\nis recorded as %q", args, got)
		}
	}
}

func TestConfig(t *testing.T) {
	t.Parallel()
	config := map[string]any{
		"lr": 3e-4, "max_tokens": 512.0, "tokenizer": "gpt2", "api_key": "VALUE", "hfToken": "VALUE", "token": nil, "use_auth_token": true,
		"wandb":       map[string]any{"project": "x", "api_key": "VALUE", "url": "https://u:VALUE@host"},
		"credentials": map[string]any{"user": "VALUE"},
		"auth":        map[string]any{"type": "basic", "password": 1234.0},
		"tokens":      []any{"<s>"}, "api_keys": []any{"VALUE", "VALUE"}, "secrets": []any{"VALUE"},
		"stages": []any{map[string]any{"token": "VALUE"}, "--api-key=VALUE"},
		"pin":    12.0, "key": "VALUE", "label_key": "y", "loss_per_token": 1.5, "steps_key": 7.0,
	}
	names, err := redact.More("Pin")
	if err != nil {
		t.Fatal(err)
	}
	got := names.Config(config)
	want := map[string]any{
		"lr": 3e-4, "max_tokens": 512.0, "tokenizer": "gpt2", "api_key": mark, "hfToken": mark, "token": nil, "use_auth_token": true,
		"wandb":       map[string]any{"project": "x", "api_key": mark, "url": "https://" + mark + "@host"},
		"credentials": mark,
		"auth":        map[string]any{"type": "basic", "password": mark},
		"tokens":      []any{"<s>"}, "api_keys": []any{mark, mark}, "secrets": mark,
		"stages": []any{map[string]any{"token": mark}, "--api-key=" + mark},
		"pin":    mark, "key": mark, "label_key": "y", "loss_per_token": 1.5, "steps_key": 7.0,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("recorded as %v\nwant        %v", got, want)
	}
	if config["api_key"] != "VALUE" || config["wandb"].(map[string]any)["api_key"] != "VALUE" {
		t.Errorf("the configuration was changed: %v", config)
	}
	if again := names.Config(got); !reflect.DeepEqual(again, got) {
		t.Errorf("not idempotent: %v, then %v", got, again)
	}
	if (redact.Names{}).Config(nil) != nil {
		t.Error("no configuration became one")
	}
}

func TestText(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"401 for https://me:VALUE@host/x: denied":                         "401 for https://" + mark + "@host/x: denied",
		"invalid key sk-proj-aaaaaaaaaaaaaaaaaaaaaa given":                "invalid key " + mark + " given",
		"sk-abcdefghijklmnopqrstuvwx":                                     mark,
		"clone ghp_abcdefghijklmnopqrstuvwxyz0123456789":                  "clone " + mark,
		"AKIAIOSFODNN7EXAMPLE.":                                           mark + ".",
		"cookie eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln":                "cookie " + mark,
		"Authorization: Basic dTpw":                                       "Authorization: Basic " + mark,
		"got bearer abcdef0123456789":                                     "got bearer " + mark,
		"a\n-----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY-----\nb": "a\n" + mark + "\nb",
		"-----BEGIN RSA PRIVATE KEY-----\ncut off":                        mark,
		"bearer authentication failed for token: x, key: 'y'":             "bearer authentication failed for token: x, key: 'y'",
		"KeyError: 'api_key'":                                             "KeyError: 'api_key'",
		"":                                                                "",
	} {
		got := redact.Text(text)
		if got != want {
			t.Errorf("%q is recorded as %q, want %q", text, got, want)
		}
		if again := redact.Text(got); again != got {
			t.Errorf("not idempotent: %q, then %q", got, again)
		}
	}
}

func TestMore(t *testing.T) {
	t.Parallel()
	names, err := redact.More("pin", "--my-thing")
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"--pin", "1", "CARD_PIN=2", "a.pin=3", "--myThing=x", "MY_THING=y", "sh", "-c", "go --pin 4 my_thing=z", "--pinned", "5", "--thing=z", "--pin-count=6", "--api-key=k"}
	want := []string{"--pin", mark, "CARD_PIN=" + mark, "a.pin=" + mark, "--myThing=" + mark, "MY_THING=" + mark, "sh", "-c", "go --pin " + mark + " my_thing=" + mark, "--pinned", "5", "--thing=z", "--pin-count=6", "--api-key=" + mark}
	if got := names.Args(args); !slices.Equal(got, want) {
		t.Errorf("recorded as %q\nwant        %q", got, want)
	}
	for _, name := range []string{"", "--", " = "} {
		if _, err := redact.More("pin", name); err == nil {
			t.Errorf("the name %q was taken", name)
		}
	}
}

func TestMarked(t *testing.T) {
	t.Parallel()
	args := redact.Names{}.Args([]string{"python3", "--api-key", "a", "--token=b", "lr=1", "--set=wandb_api_key=c", "https://u:p@h"})
	want := []string{"--api-key", "--token", "--set=wandb_api_key", "https://" + mark + "@h"}
	if got := redact.Marked(args); !slices.Equal(got, want) {
		t.Errorf("marked: %q, want %q", got, want)
	}
	if got := redact.Marked([]string{"a", "--b=c"}); got != nil {
		t.Errorf("marked: %q", got)
	}
}

// Every value of a secret name is redacted, in any spelling of the name.
func TestNoValueOfASecretName(t *testing.T) {
	t.Parallel()
	last := rapid.SampledFrom([]string{"key", "token", "secret", "password", "passwd", "passphrase", "credential", "credentials", "auth"})
	before := rapid.SampledFrom([]string{"api", "my", "hf", "wandb", "x_y", "client", "prod"})
	secret := rapid.StringMatching(`[A-Za-z0-9]{8}[g-z][A-Za-z0-9+/]{8,24}`)
	rapid.Check(t, func(t *rapid.T) {
		name, value := before.Draw(t, "word")+"_"+last.Draw(t, "last word"), secret.Draw(t, "secret")
		switch rapid.IntRange(0, 2).Draw(t, "spelling") {
		case 0:
			name = strings.ReplaceAll(name, "_", "-")
		case 1:
			name = strings.ToUpper(name)
		}
		for _, args := range [][]string{
			{name + "=" + value},
			{"--" + name + "=" + value},
			{"--" + name, value},
			{"--set=" + name + "=" + value},
			{`--json={"a": {"` + name + `": "` + value + `"}}`},
			{"sh", "-c", "x && " + name + "=" + value + " y"},
			{"sh", "-c", "x --" + name + " " + value + "; y"},
		} {
			got := redact.Names{}.Args(args)
			if strings.Contains(strings.Join(got, " "), value) {
				t.Fatalf("%q is recorded as %q", args, got)
			}
			if again := (redact.Names{}).Args(got); !slices.Equal(again, got) {
				t.Fatalf("not idempotent: %q, then %q", got, again)
			}
		}
		got := redact.Names{}.Config(map[string]any{"a": []any{map[string]any{name: value}}})
		if strings.Contains(fmt.Sprint(got), value) {
			t.Fatalf("%s is recorded as %v", name, got)
		}
	})
}
