package views

import (
	"errors"
	"log/slog"
	"testing"
)

// TestViewsForPast: only a query as of a late event, while the past is kept, wants views for the past
// alone, and they do not outlast that.
func TestViewsForPast(t *testing.T) {
	t.Parallel()
	const late = replayMost + 1
	p := NewPast(Options{Store: "S", Log: noLog{}, Logger: slog.New(slog.DiscardHandler)}, func() *Views { return nil })
	if err := p.Prepared(late); err != nil || p.asked() {
		t.Errorf("the past is not kept, and a query waits for it: %v", err)
	}
	over := p.keep()
	if err := p.Prepared(replayMost); err != nil || p.asked() {
		t.Errorf("the past of a short log is prepared: %v", err)
	}
	if err := p.Prepared(late); !errors.Is(err, ErrPreparing) || !p.asked() {
		t.Errorf("the past of a long log is not prepared: %v", err)
	}
	failed := errors.New("the log cannot be read")
	p.close(failed)
	if err := p.Prepared(late); !errors.Is(err, failed) {
		t.Errorf("the past cannot be prepared, and a query gets %v", err)
	}
	v, err := p.open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if p.views() != v {
		t.Error("views for the past are not used")
	}
	over()
	if p.views() != nil || p.asked() {
		t.Error("views for the past stay")
	}
}
