package session

import (
	"log/slog"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

// The newest save is the one mentioned last. A rank that comes late to an older
// save does not change that, whether that save has ended or not. The reason why
// the newest has not begun is the lowest rank's.
func TestNewestSave(t *testing.T) {
	s := newSaver(&decisionLog{eventWriter: &eventWriter{now: time.Now}, attempt: 1}, Store{}, nil, slog.New(slog.DiscardHandler), staging.New(nil, staging.Config{}))
	want := func(want LastSave) {
		t.Helper()
		if got := s.last(); got != want {
			t.Errorf("the last save is %+v, want %+v", got, want)
		}
	}
	want(LastSave{})
	s.asked("step-1.a1")
	s.asked("step-2.a1")
	s.asked("step-3.a1")
	s.asked("step-2.a1")
	s.move("step-1.a1", client.WaitReply{State: client.Committed})
	s.asked("step-1.a1")
	want(LastSave{Checkpoint: "step-3.a1"})
	s.reject("step-2.a1", 0, "of another save")
	s.reject("step-3.a1", 2, "no disk")
	s.reject("step-3.a1", 1, "no room")
	want(LastSave{"step-3.a1", "rank 1 could not save: no room"})
	s.move("step-3.a1", client.WaitReply{State: client.Begun})
	want(LastSave{Checkpoint: "step-3.a1"})
}
