package otlp

import (
	"compress/gzip"
	"context"
	"encoding/pem"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	collector "go.opentelemetry.io/proto/slim/otlp/collector/trace/v1"

	"github.com/ckptstore/ckptstore/events"
)

// tree is the trace of [scene.save].
var tree = []string{
	"save", "save/commit",
	"save/rank 0", "save/rank 0/copy 750ms", "save/rank 0/queue 500ms", "save/rank 0/report", "save/rank 0/sync 125ms", "save/rank 0/wait 250ms", "save/rank 0/write 3s",
	"save/rank 1", "save/rank 1/copy 750ms", "save/rank 1/queue 500ms", "save/rank 1/report", "save/rank 1/sync 125ms", "save/rank 1/wait 250ms", "save/rank 1/write 3s",
}

// withoutReports leaves the spans out that an event has only if the log stored it later than its
// phases ended.
func withoutReports(spans []string) []string {
	return slices.DeleteFunc(slices.Clone(spans), func(s string) bool { return strings.HasSuffix(s, "/report") })
}

// TestTraces: each save and load that ends after the first start is sent once, in order, with its
// ranks and phases, also those that end while no tracer runs.
func TestTraces(t *testing.T) {
	t.Parallel()
	s, c := newScene(t), newReceiver(t)
	s.save(10) // before the first start
	var log logged
	first := s.tracer(c.URL+"/", &log, func(env map[string]string) {
		env["OTEL_EXPORTER_OTLP_HEADERS"] = "authorization=Bearer%20x, x-scope = team"
		env["OTEL_SERVICE_NAME"] = "training"
		env["OTEL_RESOURCE_ATTRIBUTES"] = "host.name=gpu1,service.name=other"
	})
	s.starts(first)
	open := s.begin(20)
	s.add(&events.CheckpointCommitted{Attempt: 1, Checkpoint: open, Manifest: "m", Bytes: 200, ManifestTook: seconds(0.0625)})
	got := c.next()
	if got.checkpoint != open || !slices.Equal(withoutReports(got.spans), withoutReports(tree)) {
		t.Errorf("%s:\n%s", got.checkpoint, strings.Join(got.spans, "\n"))
	}
	if got.headers.Get("Authorization") != "Bearer x" || got.headers.Get("X-Scope") != "team" || got.headers.Get("User-Agent") != "ckptstore/v1" {
		t.Errorf("headers %v", got.headers)
	}
	if r := got.resource; r["service.name"] != "training" || r["host.name"] != "gpu1" || r["ckptstore.store"] != s.store.ID || r["service.version"] != "v1" {
		t.Errorf("resource %v", r)
	}
	s.add(
		&events.RestoreBegun{Attempt: 1, Load: 1, Checkpoint: open, WorldSize: 2},
		&events.RestoreCompleted{Attempt: 1, Load: 1, Checkpoint: open, Tier: "files", Resolve: seconds(0.5), Read: seconds(2), Check: seconds(1)},
		&events.RestoreBegun{Attempt: 1, Load: 2, Checkpoint: open, WorldSize: 2},
		&events.RestoreFailed{Attempt: 1, Load: 2, Checkpoint: open, Error: "block 3 is damaged"},
	)
	loaded, failed := c.next(), c.next()
	if want := []string{"load", "load/check", "load/read", "load/resolve"}; !slices.Equal(loaded.spans, want) {
		t.Errorf("%q", loaded.spans)
	}
	if want := []string{"load failed: block 3 is damaged"}; !slices.Equal(failed.spans, want) || failed.id == loaded.id {
		t.Errorf("%q", failed.spans)
	}
	// A save is open while the owner of the store changes; another ends while no tracer runs.
	open = s.begin(30)
	first.Close()
	if n := first.Counts(); n.Sent != 3 || n.Waiting != 0 || sum(n.Dropped) != 0 || log.count("level=") != 0 {
		t.Errorf("%+v, log %s", n, log.text.String())
	}
	s.close()
	s.open()
	s.add(&events.CheckpointAborted{Attempt: 1, Checkpoint: open, Reason: "rank 0: disk full"})
	between := s.save(40)
	second := s.tracer(c.URL, &log)
	s.starts(second)
	got = c.next()
	if got.checkpoint != open || got.spans[0] != "save failed: rank 0: disk full" || len(withoutReports(got.spans)) != len(withoutReports(tree))-1 {
		t.Errorf("%s: %q", got.checkpoint, got.spans)
	}
	if got = c.next(); got.checkpoint != between {
		t.Errorf("%s, want %s", got.checkpoint, between)
	}
	last := s.save(50)
	second.Close() // sends what the log has
	if got = c.next(); got.checkpoint != last || len(c.traces) > 0 {
		t.Errorf("%s, and %d more", got.checkpoint, len(c.traces))
	}
}

// TestSentAgain: the owner ends after the collector has taken a trace and before it has answered. The
// next process sends it again, as the same trace.
func TestSentAgain(t *testing.T) {
	t.Parallel()
	s, c := newScene(t), newReceiver(t)
	hang := make(chan struct{})
	var once []trace
	took := make(chan trace, 1)
	c.replies(func(_ http.ResponseWriter, r *http.Request) bool {
		select {
		case took <- trace{}:
		default:
		}
		select {
		case <-hang:
		case <-r.Context().Done():
		}
		return true // it has the trace; the sender does not learn of it
	})
	first := s.tracer(c.URL, io.Discard)
	first.flush = 10 * time.Millisecond
	s.starts(first)
	id := s.save(10)
	<-took
	first.Close()
	close(hang)
	once = append(once, c.next())
	c.replies(nil)
	s.close()
	s.open()
	second := s.tracer(c.URL, io.Discard)
	s.starts(second)
	once = append(once, c.next())
	second.Close()
	if once[0].checkpoint != id || once[0].id != once[1].id || !slices.Equal(once[0].ids, once[1].ids) || !slices.Equal(once[0].spans, once[1].spans) {
		t.Errorf("two traces: %+v", once)
	}
}

// TestTwoProcesses: of two tracers of a store one sends, and the other takes over when it ends.
func TestTwoProcesses(t *testing.T) {
	t.Parallel()
	s, c := newScene(t), newReceiver(t)
	var log logged
	first, second := s.tracer(c.URL, &log), s.tracer(c.URL, &log)
	s.starts(first)
	second.start(t.Context())
	for step := 10; step <= 30; step += 10 {
		if id := s.save(step); c.next().checkpoint != id {
			t.Errorf("not the trace of %s", id)
		}
	}
	if second.holds.Load() || second.Counts().Sent > 0 {
		t.Error("both send")
	}
	first.Close()
	id := s.save(40)
	if got := c.next(); got.checkpoint != id {
		t.Errorf("%s, want %s", got.checkpoint, id)
	}
	second.Close()
	if n := second.Counts(); n.Sent != 1 || len(c.traces) > 0 || log.count("level=") > 0 {
		t.Errorf("%+v, %d more, log %s", n, len(c.traces), log.text.String())
	}
}

// TestBadCollectors: a collector that is down, refuses, is slow to answer or does not. Appends and
// queries of the store continue, the queue keeps the newest traces, the others are counted, and the
// log has one line for the trouble and one for its end.
func TestBadCollectors(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		reply   func(http.ResponseWriter, *http.Request) bool
		timeout string // of a request, in milliseconds
		reason  string // for which traces are dropped
		line    string
	}{
		"down":      {nil, "10000", dropFull, "collector does not take traces; they wait in a queue"},
		"busy":      {status(http.StatusServiceUnavailable), "10000", dropFull, "it answered 503 Service Unavailable"},
		"throttled": {status(http.StatusTooManyRequests), "10000", dropFull, "it answered 429 Too Many Requests"},
		"hangs": {func(_ http.ResponseWriter, r *http.Request) bool {
			<-r.Context().Done()
			return false
		}, "3000", dropFull, "no answer within 3s"},
		"does not end its answer": {func(w http.ResponseWriter, r *http.Request) bool {
			_, _ = w.Write([]byte("x"))
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
			return false
		}, "3000", dropFull, "collector does not take traces; they wait in a queue"},
		"cuts":     {func(http.ResponseWriter, *http.Request) bool { panic(http.ErrAbortHandler) }, "10000", dropFull, "EOF"},
		"fails":    {status(http.StatusInternalServerError), "10000", dropRefused, "it answered 500 Internal Server Error"},
		"no token": {status(http.StatusUnauthorized), "10000", dropRefused, "it answered 401 Unauthorized"},
		"moved": {func(w http.ResponseWriter, r *http.Request) bool {
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
			return false
		}, "10000", dropRefused, "it answered 307 Temporary Redirect"},
		"rejects": {func(w http.ResponseWriter, _ *http.Request) bool {
			text, _ := proto.Marshal(&collector.ExportTraceServiceResponse{PartialSuccess: &collector.ExportTracePartialSuccess{RejectedSpans: 17, ErrorMessage: "too old"}})
			_, _ = w.Write(text)
			return false
		}, "10000", dropRefused, "it rejected 17 spans: too old"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, r := newScene(t), newReceiver(t)
			address := r.Listener.Addr().String()
			if r.replies(c.reply); c.reply == nil {
				r.Close()
			}
			var log logged
			tracer := s.tracer("http://"+address, &log, func(env map[string]string) { env["OTEL_EXPORTER_OTLP_TIMEOUT"] = c.timeout })
			const many = 8
			room := 2
			if c.reason == dropRefused {
				room = many // none is dropped because the sender is slow
			}
			tracer.queue, tracer.flush = newQueue(room), 10*time.Millisecond
			s.starts(tracer)
			var ids []string
			for step := range many { // an append that waits would wait for ever
				ids = append(ids, s.save(step))
				if step == 0 {
					until(t, "sent once", tracer.down.Load)
				}
			}
			want, waiting := uint64(many-3), 3 // two in the queue, and another is sent
			if c.reason == dropRefused {
				want, waiting = many, 0
			}
			until(t, "counted", func() bool { return tracer.Counts().Dropped[c.reason] >= want })
			n := tracer.Counts()
			if n.Sent != 0 || n.Dropped[c.reason] != want || sum(n.Dropped) != want || n.Waiting != waiting {
				t.Errorf("%+v", n)
			}
			if c.reply == nil {
				tracer.Close()
				if log.count("traces not sent; the next process with --traces sends them") != 1 {
					t.Errorf("log:\n%s", log.text.String())
				}
			} else {
				r.replies(nil)
				last := s.save(many)
				for got := r.next(); got.checkpoint != last; got = r.next() {
					if c.reason == dropRefused || !slices.Contains(ids, got.checkpoint) {
						t.Errorf("trace of %s", got.checkpoint)
					}
				}
				until(t, "logged that it takes traces again", func() bool { return log.count("collector takes traces again") == 1 })
				until(t, "all counted", func() bool { return tracer.Counts().Waiting == 0 })
				tracer.Close()
			}
			if log.count("level=WARN") != 1+log.count("traces not sent") || log.count(c.line) != 1 {
				t.Errorf("log:\n%s", log.text.String())
			}
		})
	}
}

// TestOld: a save that ended long ago is not sent.
func TestOld(t *testing.T) {
	t.Parallel()
	s, c := newScene(t), newReceiver(t)
	tracer := s.tracer(c.URL, io.Discard)
	tracer.oldest = 0
	s.starts(tracer)
	s.save(10)
	until(t, "counted", func() bool { return tracer.Counts().Dropped[dropOld] == 1 })
	tracer.Close()
	if len(c.traces) > 0 {
		t.Error("it is sent")
	}
}

// TestCompressed: with gzip, the body is compressed.
func TestCompressed(t *testing.T) {
	t.Parallel()
	s, c := newScene(t), newReceiver(t)
	unpack := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, err := gzip.NewReader(r.Body)
		if err != nil || r.Header.Get("Content-Encoding") != "gzip" {
			t.Errorf("%v %v", err, r.Header)
			return
		}
		r.Body = io.NopCloser(text)
		c.ServeHTTP(w, r)
	}))
	defer unpack.Close()
	tracer := s.tracer(unpack.URL, io.Discard, func(env map[string]string) { env["OTEL_EXPORTER_OTLP_TRACES_COMPRESSION"] = "gzip" })
	s.starts(tracer)
	id := s.save(10)
	if got := c.next(); got.checkpoint != id {
		t.Errorf("%+v", got)
	}
	tracer.Close()
}

// TestEnvironment checks what the variables mean, and that an error names the variable and not its
// value.
func TestEnvironment(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	noCertificate := filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(noCertificate, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	const all, own = "OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_TRACES_"
	base := map[string]string{all + "ENDPOINT": "http://127.0.0.1:4318"}
	for _, c := range []struct {
		set  map[string]string
		want string // URL of the endpoint, or a part of the error
	}{
		{nil, "http://127.0.0.1:4318/v1/traces"},
		{map[string]string{all + "ENDPOINT": "https://otel.example/base/"}, "https://otel.example/base/v1/traces"},
		{map[string]string{own + "ENDPOINT": "https://otel.example/api"}, "https://otel.example/api"},
		{map[string]string{all + "PROTOCOL": "http/protobuf", all + "TIMEOUT": "2500", all + "COMPRESSION": "none"}, "http://127.0.0.1:4318/v1/traces"},
		{map[string]string{all + "PROTOCOL": "grpc", own + "PROTOCOL": "http/protobuf"}, "http://127.0.0.1:4318/v1/traces"},
		{map[string]string{all + "ENDPOINT": ""}, "no collector is named: set $OTEL_EXPORTER_OTLP_ENDPOINT"},
		{map[string]string{all + "ENDPOINT": "secret:4318"}, "$OTEL_EXPORTER_OTLP_ENDPOINT: want an http or https URL"},
		{map[string]string{all + "ENDPOINT": "ftp://secret"}, "$OTEL_EXPORTER_OTLP_ENDPOINT: want an http or https URL"},
		{map[string]string{own + "ENDPOINT": "http://"}, "$OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: want an http or https URL"},
		{map[string]string{own + "ENDPOINT": "http://x\x7fsecret"}, "$OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: want an http or https URL"},
		{map[string]string{all + "PROTOCOL": "grpc"}, "$OTEL_EXPORTER_OTLP_PROTOCOL: only http/protobuf is supported"},
		{map[string]string{all + "TIMEOUT": "2s"}, "$OTEL_EXPORTER_OTLP_TIMEOUT: want milliseconds"},
		{map[string]string{own + "TIMEOUT": "0"}, "$OTEL_EXPORTER_OTLP_TRACES_TIMEOUT: want milliseconds"},
		{map[string]string{all + "COMPRESSION": "zstd"}, "$OTEL_EXPORTER_OTLP_COMPRESSION: want gzip or none"},
		{map[string]string{all + "HEADERS": "secret"}, "$OTEL_EXPORTER_OTLP_HEADERS: want NAME=VALUE"},
		{map[string]string{all + "HEADERS": "a=%zzsecret"}, "$OTEL_EXPORTER_OTLP_HEADERS: want NAME=VALUE"},
		{map[string]string{all + "HEADERS": "a=secret%0d%0ab"}, "$OTEL_EXPORTER_OTLP_HEADERS: it has a header that HTTP does not allow"},
		{map[string]string{all + "HEADERS": "a b=secret"}, "$OTEL_EXPORTER_OTLP_HEADERS: it has a header that HTTP does not allow"},
		{map[string]string{"OTEL_RESOURCE_ATTRIBUTES": "secret"}, "$OTEL_RESOURCE_ATTRIBUTES: want NAME=VALUE"},
		{map[string]string{all + "CERTIFICATE": filepath.Join(dir, "none")}, "$OTEL_EXPORTER_OTLP_CERTIFICATE: open "},
		{map[string]string{own + "CERTIFICATE": noCertificate}, "has no certificate in PEM"},
		{map[string]string{all + "CLIENT_KEY": noCertificate}, "set $OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and $OTEL_EXPORTER_OTLP_CLIENT_KEY"},
		{map[string]string{all + "CLIENT_KEY": noCertificate, all + "CLIENT_CERTIFICATE": noCertificate}, "$OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE: "},
	} {
		got, err := FromEnvironment(func(name string) string {
			if v, ok := c.set[name]; ok {
				return v
			}
			return base[name]
		})
		switch {
		case err == nil && got.Endpoint.String() != c.want:
			t.Errorf("%v: endpoint %s", c.set, got.Endpoint)
		case err != nil && (!strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "secret") || !strings.HasPrefix(err.Error(), "--traces: ")):
			t.Errorf("%v: %v", c.set, err)
		}
		if c.set[all+"TIMEOUT"] == "2500" && got.Timeout != 2500*time.Millisecond || c.set == nil && (got.Timeout != defaultTimeout || got.Service != defaultService || got.Compress) {
			t.Errorf("%+v", got)
		}
	}
}

// TestTLS: the collector's certificate is checked with the given CA, and without it refused.
func TestTLS(t *testing.T) {
	t.Parallel()
	s, c := newScene(t), newReceiver(t)
	secure := httptest.NewTLSServer(c)
	defer secure.Close()
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	var log logged
	refused := s.tracer(secure.URL, &log)
	refused.flush = 10 * time.Millisecond
	s.starts(refused)
	id := s.save(10)
	until(t, "logged", func() bool { return log.count("certificate") > 0 })
	refused.Close()
	tracer := s.tracer(secure.URL, io.Discard, func(env map[string]string) { env["OTEL_EXPORTER_OTLP_CERTIFICATE"] = ca })
	s.starts(tracer)
	if got := c.next(); got.checkpoint != id {
		t.Errorf("%+v", got)
	}
	tracer.Close()
}

// TestFollowEnds: an event whose trace was not made because the process ends is not passed by a later
// event.
func TestFollowEnds(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	tracer := newTracer(nil, Config{}, Options{})
	tracer.queue.reset(6)
	err := tracer.follow(ctx, func(yield func(events.Recorded, error) bool) {
		cancel()
		// Its body is void: without a store no trace is made of it.
		commit := events.Event{Kind: (events.CheckpointCommitted{}).Kind(), Version: 1, Data: []byte("[]")}
		if yield(events.Recorded{Sequence: 7, Stored: time.Now(), Event: commit}, nil) {
			yield(events.Recorded{Sequence: 8, Event: events.Event{Kind: (events.Metrics{}).Kind()}}, nil)
		}
	}, func(seq uint64) { t.Errorf("passed %d", seq) })
	if done := tracer.queue.done(); !errors.Is(err, context.Canceled) || done != 6 {
		t.Errorf("done up to %d, %v", done, err)
	}
}
