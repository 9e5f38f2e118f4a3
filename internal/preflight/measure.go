package preflight

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/ckptstore/ckptstore/internal/httpkit"
)

const (
	// window is how long bytes are sent in each direction.
	window = 500 * time.Millisecond
	// Limit bounds the measurement of one pair. [Run] has at most five rounds of them.
	Limit = 1700 * time.Millisecond
	block = 256 << 10
)

// Path begins the paths of [Handler].
const Path = "/v1/preflight/"

// received is what one side has received.
type received struct {
	Bytes   int64   `json:"bytes"`
	Seconds float64 `json:"seconds"` // from the first to the last of them
}

func (r received) rate() float64 { return float64(r.Bytes) / max(r.Seconds, 1e-3) }

// Handler takes and gives the bytes of measurements.
func Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+Path+"take", func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		_ = control.SetReadDeadline(time.Now().Add(Limit)) // best effort: the client has a limit too
		got, err := receive(r.Body)
		if err != nil {
			return // the client is gone
		}
		_ = httpkit.Reply(w, got)
	})
	mux.HandleFunc("GET "+Path+"give", func(w http.ResponseWriter, _ *http.Request) {
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(Limit))
		_, _ = io.Copy(w, &source{}) // the client counts
	})
	return mux
}

// Measure returns the lower one of the rates in bytes per second in both directions between this
// node and that of url, within [Limit].
func Measure(ctx context.Context, client *http.Client, url string) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, Limit)
	defer cancel()
	defer client.CloseIdleConnections()
	sent, err := exchange(ctx, client, http.MethodPost, url+Path+"take", io.NopCloser(&source{}), func(body io.Reader) (received, error) {
		text, err := io.ReadAll(io.LimitReader(body, 4096))
		if err != nil {
			return received{}, err
		}
		return httpkit.Decode[received](text)
	})
	if err != nil {
		return 0, err
	}
	got, err := exchange(ctx, client, http.MethodGet, url+Path+"give", nil, receive)
	if err != nil {
		return 0, err
	}
	return min(sent.rate(), got.rate()), nil
}

func exchange(ctx context.Context, client *http.Client, method, url string, body io.ReadCloser, read func(io.Reader) (received, error)) (received, error) {
	r, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		return received{}, err
	}
	reply, err := client.Do(r)
	if err != nil {
		return received{}, err
	}
	defer reply.Body.Close()
	if reply.StatusCode != http.StatusOK {
		return received{}, fmt.Errorf("%s: status %s", url, reply.Status)
	}
	return read(reply.Body)
}

// receive counts bytes.
func receive(r io.Reader) (got received, err error) {
	buf := make([]byte, block)
	var began time.Time
	for {
		n, err := r.Read(buf)
		if began.IsZero() && n > 0 {
			began = time.Now()
		}
		got.Bytes += int64(n)
		if err == io.EOF {
			got.Seconds = time.Since(began).Seconds()
			return got, nil
		}
		if err != nil {
			return got, err
		}
	}
}

// source gives zeros for [window].
type source struct{ until time.Time }

var _ io.Reader = (*source)(nil)

// Read implements [io.Reader].
func (s *source) Read(p []byte) (int, error) {
	if s.until.IsZero() {
		s.until = time.Now().Add(window)
	}
	if time.Now().After(s.until) {
		return 0, io.EOF
	}
	clear(p)
	return len(p), nil
}
