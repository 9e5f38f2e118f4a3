package s3

import (
	"context"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"

	minio "github.com/minio/minio-go/v7"
)

// When a read is sent a second time.
const (
	hedgeLeast  = 2 * time.Second // without an answer
	hedgeFactor = 3               // times the wait of 95 % of the recent reads, if that is more
	hedgeEvery  = 20              // reads for each
	hedgeBurst  = 4               // that are sent before so many reads
	hedgeRecent = 128             // reads whose waits are known
)

// hedger decides when a read that has no answer is sent a second time, on a connection of its own.
// One server of many may be slow, or a packet lost, while the others answer at once. The share of
// such reads is bounded, so that a server which is slow as a whole has little more to do.
type hedger struct {
	mu     sync.Mutex
	waits  []time.Duration // until the answers of recent reads; in a ring
	at     int
	credit int // each read adds 1, and a second one takes hedgeEvery
}

func newHedger() *hedger { return &hedger{credit: hedgeBurst * hedgeEvery} }

// begin counts a read. It returns after which time without an answer it may be sent again.
func (h *hedger) begin() time.Duration {
	h.mu.Lock()
	h.credit = min(h.credit+1, hedgeBurst*hedgeEvery)
	waits := slices.Clone(h.waits)
	h.mu.Unlock()
	if len(waits) == 0 {
		return hedgeLeast
	}
	slices.Sort(waits)
	return max(hedgeLeast, hedgeFactor*waits[(len(waits)-1)*95/100])
}

// again reports whether a read may be sent again.
func (h *hedger) again() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.credit < hedgeEvery {
		return false
	}
	h.credit -= hedgeEvery
	return true
}

// answered notes how long a read has waited for its answer.
func (h *hedger) answered(after time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.waits) < hedgeRecent {
		h.waits = append(h.waits, after)
		return
	}
	h.waits[h.at] = after
	h.at = (h.at + 1) % hedgeRecent
}

// got is the answer to a read.
type got struct {
	number int // of the request
	call   *call
	body   io.ReadCloser
	info   minio.ObjectInfo
	header http.Header
	err    error
	after  time.Duration
}

// endingBody is a body that releases the context of its request.
type endingBody struct {
	io.ReadCloser
	end context.CancelFunc
}

func (e endingBody) Close() error {
	defer e.end()
	return e.ReadCloser.Close()
}

// get reads an object, or a range of it. If no answer comes, it sends the request a second time: the
// first answer is the result, and the other request ends. A failure that another attempt may not
// have is no answer while the other request is under way. c has the outcome of the request whose
// answer it was. The body outlives the attempt.
func (b *Bucket) get(ctx context.Context, c *call, key string, options minio.GetObjectOptions) (io.ReadCloser, minio.ObjectInfo, http.Header, error) {
	answers, done := make(chan got), make(chan struct{})
	defer close(done)
	var ends []context.CancelFunc
	send := func(fresh bool) {
		own, number, began := *c, len(ends), time.Now()
		own.fresh = fresh
		ctx, end := context.WithCancel(ctx)
		ends = append(ends, end)
		go func() {
			g := got{number: number, call: &own}
			g.body, g.info, g.header, g.err = own.core.GetObject(with(ctx, &own), b.at.Bucket, key, options)
			g.after = time.Since(began)
			select {
			case answers <- g:
			case <-done:
				if g.err == nil {
					_ = g.body.Close() // nothing was read of it
				}
			}
		}()
	}
	silent := time.NewTimer(b.hedger.begin())
	defer silent.Stop()
	send(false)
	for answered := 0; ; {
		var g got
		select {
		case g = <-answers:
		case <-silent.C:
			if ctx.Err() == nil && b.hedger.again() {
				b.transport.counts.hedged.Add(1)
				send(true)
			}
			continue
		}
		if answered++; g.err != nil && answered < len(ends) {
			if is := judge(g.err, request{class: c.class}, g.call); is != final && is != refused {
				continue
			}
		}
		for number, end := range ends {
			if g.err != nil || number != g.number {
				end()
			}
		}
		c.status, c.answer, c.used = g.call.status, g.call.answer, g.call.used
		if g.err != nil {
			return nil, g.info, g.header, g.err
		}
		b.hedger.answered(g.after)
		return endingBody{g.body, ends[g.number]}, g.info, g.header, nil
	}
}
