package front

import (
	"testing"
	"time"

	"golang.org/x/sync/semaphore"
)

// TestBatchThatTookTooLong checks that the rest of a batch whose time has passed
// is refused with a retryable error: this process may have been stopped in
// between.
func TestBatchThatTookTooLong(t *testing.T) {
	f := &Front{batches: map[string]bool{}, streams: make(chan struct{}, streams)}
	s := &session{f: f, budget: semaphore.NewWeighted(1 << 20), lapsed: "old"}
	s.batch = s.newBatch("new")
	s.batch.count, s.batch.until = 1, time.Now().Add(-time.Second)
	for _, m := range []struct{ id, number string }{{"new", "2"}, {"old", "3"}} {
		h := header{{headerBatch, m.id}, {headerBatchNumber, m.number}}
		if err := s.batched(frame{subject: "ckpt.a.b.r0.report.metrics"}, h, nil); err != nil {
			t.Fatal(err)
		}
		if why := s.batch.why; why == nil || why.Code != CodeBusy {
			t.Errorf("message %s of batch %s: %v", m.number, m.id, why)
		}
	}
}
