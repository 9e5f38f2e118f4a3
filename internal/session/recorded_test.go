package session

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/redact"
)

// A job's events have no secrets in the log. The original body keeps them:
// workers start with the original values.
func TestRecorded(t *testing.T) {
	t.Parallel()
	names, err := redact.More("pin")
	if err != nil {
		t.Fatal(err)
	}
	const text = "401 for https://me:SECRET@host"
	for _, body := range []events.Body{
		&events.JobStarted{Command: []string{"train", "--pin", "SECRET", "--api-key=SECRET"}, Flags: []string{"--set=hf_token=SECRET"}},
		&events.JobEnded{Reason: text},
		&events.TrialCreated{Config: map[string]any{"wandb": map[string]any{"api_key": "SECRET"}, "pin": "SECRET"}},
		&events.TrialPaused{Reason: text},
		&events.TrialErrored{Message: text},
		&events.WorkerExited{Message: text, Traceback: text},
		&events.GroupStopped{Reason: text},
		&events.WriteFailed{Error: text},
		&events.CheckpointAborted{Reason: text},
		&events.RestoreFailed{Error: text},
	} {
		before := marshal(t, body)
		got := recorded(names, body)
		if got.Kind() != body.Kind() {
			t.Errorf("%s became %s", body.Kind(), got.Kind())
		}
		if out := marshal(t, got); strings.Contains(out, "SECRET") || !strings.Contains(out, redact.Mark) {
			t.Errorf("the log has %s", out)
		}
		if after := marshal(t, body); after != before {
			t.Errorf("%s was changed: %s", body.Kind(), after)
		}
	}
	m := &events.Metrics{Metrics: map[string]any{"token": "x", "api_key": "y"}}
	if got := recorded(names, m); got != events.Body(m) {
		t.Errorf("metrics became %v", got)
	}
}

func marshal(t *testing.T, v any) string {
	t.Helper()
	out, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}
