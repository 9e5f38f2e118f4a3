package store

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/natstest"
)

// TestDeniedTrainer: init makes everything that a trainer with few rights needs, on a server where
// it may make streams; denied operations of such a trainer fail at once.
func TestDeniedTrainer(t *testing.T) {
	t.Parallel()
	url, stop, err := natstest.Start(t.TempDir(), `
accounts { ckpt { jetstream: enabled, users: [
  { user: admin, password: a }
  { user: trainer, password: t, permissions: {
      publish: { allow: [ "ckpt.mine.>", "$KV.CKPT_LEASES.>", "$JS.API.STREAM.INFO.>", "$JS.API.STREAM.MSG.GET.>", "$JS.API.CONSUMER.>" ] }
      subscribe: { allow: [ "_INBOX.>" ] } } }
] }, SYS {} }
system_account: SYS`)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	at := strings.TrimPrefix(url, "nats://")
	data := filepath.Join(t.TempDir(), "shared")
	if _, err := InitURL(t.Context(), "nats://admin:a@"+at, URLOptions{Data: data}); err != nil {
		t.Fatal(err)
	}
	s := open(t, fmt.Sprintf("nats://trainer:t@%s", at))
	_, release, err := s.HoldRun(t.Context(), "mine", "job-1")
	if err != nil {
		t.Fatal(err)
	}
	for run, want := range map[string]error{"mine": nil, "another": jetlog.ErrNotAllowed} {
		f, err := metrics("fact of "+run, run, 1)
		if err != nil {
			t.Fatal(err)
		}
		_, err = s.Log.Append(t.Context(), f)
		if !errors.Is(err, want) || Unserved(err) {
			t.Errorf("run %s: %v", run, err)
		}
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
}
