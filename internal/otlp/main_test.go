package otlp

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	collector "go.opentelemetry.io/proto/slim/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/slim/otlp/common/v1"
	otlptrace "go.opentelemetry.io/proto/slim/otlp/trace/v1"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/natstest"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

func TestMain(m *testing.M) { natstest.Main(m) }

// scene is a store with one run.
type scene struct {
	t     *testing.T
	dir   string
	store *store.Store
	job   string
	lane  uint64
}

func newScene(t *testing.T) *scene {
	t.Helper()
	s := &scene{t: t, dir: filepath.Join(t.TempDir(), "s"), job: store.NewID()}
	if _, err := store.Init(t.Context(), s.dir, ""); err != nil {
		t.Fatal(err)
	}
	s.open()
	t.Cleanup(s.close)
	s.add(
		&events.JobStarted{Job: s.job, Host: "here", PID: 1, NProc: 2, NNodes: 1},
		&events.GroupStarted{Attempt: 1, Job: s.job, WorldSize: 2, Ranks: []events.RankPlacement{{}, {Rank: 1}}},
		&events.TrainingStarted{Attempt: 1},
	)
	return s
}

func (s *scene) open() {
	s.t.Helper()
	var err error
	if s.store, err = store.Open(s.t.Context(), store.Options{Location: s.dir}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *scene) close() {
	if s.store == nil {
		return
	}
	if err := s.store.Close(); err != nil {
		s.t.Error(err)
	}
	s.store = nil
}

// add appends events of the run.
func (s *scene) add(bodies ...events.Body) {
	s.t.Helper()
	for _, b := range bodies {
		stamp := events.Stamp{ID: store.NewID(), Source: "trainer/" + s.job, Time: time.Now()}
		if b.Kind().Decides() {
			d, err := events.NewDecision(stamp, events.Aggregate{Run: "bert", Trial: projections.DefaultTrial}, b)
			if err == nil {
				s.lane, err = s.store.Log.Decide(s.t.Context(), d, s.lane)
			}
			if err != nil {
				s.t.Fatal(err)
			}
			continue
		}
		scope := events.Scope{Run: "bert", Trial: projections.DefaultTrial, Actor: events.Node(0)}
		if b.Kind().Family() == "job" {
			scope.Trial = events.None
		}
		f, err := events.NewFact(stamp, scope, b)
		if err == nil {
			_, err = s.store.Log.Append(s.t.Context(), f)
		}
		if err != nil {
			s.t.Fatal(err)
		}
	}
}

func seconds(v float64) *float64 { return &v }

// begin appends the begin of a save of two ranks, up to their writes.
func (s *scene) begin(step int) (id string) {
	s.t.Helper()
	name := fmt.Sprintf("step-%d", step)
	id = name + ".a1"
	s.add(&events.CheckpointBegun{Attempt: 1, Checkpoint: id, Name: name, Step: int64(step), WorldSize: 2})
	for rank := range 2 {
		s.add(&events.WriteSealed{Attempt: 1, Checkpoint: id, Rank: rank, Waited: seconds(0.25), Copied: seconds(0.75)})
	}
	s.add(&events.CheckpointStaged{Attempt: 1, Checkpoint: id})
	for rank := range 2 {
		s.add(&events.WriteCompleted{
			Attempt: 1, Checkpoint: id, Rank: rank, BytesWritten: 70, BytesReused: 30,
			Queued: seconds(0.5), Digest: seconds(1), Write: seconds(2), Sync: seconds(0.125),
		})
	}
	return id
}

// save appends a whole save.
func (s *scene) save(step int) (id string) {
	s.t.Helper()
	id = s.begin(step)
	s.add(&events.CheckpointCommitted{Attempt: 1, Checkpoint: id, Manifest: "m", Bytes: 200, ManifestTook: seconds(0.0625)})
	return id
}

// trace is what a collector has got of one trace.
type trace struct {
	id         string
	checkpoint string
	spans      []string // path, length of a phase, why it failed; sorted
	ids        []string // of the spans
	headers    http.Header
	resource   map[string]string
}

// receiver is a collector. It decodes each request with the official messages and checks what
// OTLP demands of it, then answers as reply does; nil: it has taken the trace.
type receiver struct {
	*httptest.Server
	t      *testing.T
	traces chan trace

	mu    sync.Mutex
	reply func(w http.ResponseWriter, r *http.Request) (took bool)
}

func newReceiver(t *testing.T) *receiver {
	t.Helper()
	c := &receiver{t: t, traces: make(chan trace, 1000)}
	c.Server = httptest.NewServer(c)
	t.Cleanup(c.Close)
	return c
}

// replies changes the answers.
func (c *receiver) replies(reply func(w http.ResponseWriter, r *http.Request) (took bool)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reply = reply
}

func status(code int) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(code)
		return false
	}
}

// ServeHTTP implements [http.Handler].
func (c *receiver) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	text, err := io.ReadAll(r.Body)
	if err != nil || r.URL.Path != tracesPath || r.Header.Get("Content-Type") != "application/x-protobuf" || r.Method != http.MethodPost {
		c.t.Errorf("%s %s %s: %v", r.Method, r.URL.Path, r.Header.Get("Content-Type"), err)
	}
	one := c.decode(text)
	one.headers = r.Header
	c.mu.Lock()
	reply := c.reply
	c.mu.Unlock()
	if reply != nil && !reply(w, r) {
		return
	}
	c.traces <- one
	answer, err := proto.Marshal(&collector.ExportTraceServiceResponse{})
	if err != nil {
		c.t.Error(err)
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
	_, _ = w.Write(answer)
}

func (c *receiver) decode(text []byte) (out trace) {
	var r collector.ExportTraceServiceRequest
	if err := proto.Unmarshal(text, &r); err != nil {
		c.t.Error(err)
		return out
	}
	if len(r.GetResourceSpans()) != 1 || len(r.GetResourceSpans()[0].GetScopeSpans()) != 1 {
		c.t.Errorf("request %v", &r)
		return out
	}
	out.resource = c.texts(r.GetResourceSpans()[0].GetResource().GetAttributes())
	spans := r.GetResourceSpans()[0].GetScopeSpans()[0].GetSpans()
	paths, of := map[string]string{}, map[string]*otlptrace.Span{}
	for i, s := range spans {
		id := fmt.Sprintf("%x", s.GetSpanId())
		parent := of[fmt.Sprintf("%x", s.GetParentSpanId())]
		path := s.GetName()
		if parent != nil {
			path = paths[fmt.Sprintf("%x", s.GetParentSpanId())] + "/" + path
		}
		length := time.Duration(s.GetEndTimeUnixNano() - s.GetStartTimeUnixNano()) //nolint:gosec // checked below
		switch {
		case len(s.GetTraceId()) != 16 || !bytes.Equal(s.GetTraceId(), spans[0].GetTraceId()) || bytes.Equal(s.GetTraceId(), make([]byte, 16)),
			len(s.GetSpanId()) != 8 || of[id] != nil || bytes.Equal(s.GetSpanId(), make([]byte, 8)),
			(i == 0) != (len(s.GetParentSpanId()) == 0), i > 0 && parent == nil,
			s.GetKind() != otlptrace.Span_SPAN_KIND_INTERNAL, s.GetName() == "",
			s.GetStartTimeUnixNano() == 0 || s.GetEndTimeUnixNano() < s.GetStartTimeUnixNano(),
			parent != nil && (s.GetStartTimeUnixNano() < parent.GetStartTimeUnixNano() || s.GetEndTimeUnixNano() > parent.GetEndTimeUnixNano()):
			c.t.Errorf("span %d: %v", i, s)
		}
		of[id], paths[id] = s, path
		line := path
		if strings.Count(path, "/") == 2 && s.GetName() != "report" {
			line += " " + length.String()
		}
		if s.GetStatus().GetCode() == otlptrace.Status_STATUS_CODE_ERROR {
			line += " failed: " + s.GetStatus().GetMessage()
		}
		out.spans, out.ids = append(out.spans, line), append(out.ids, id)
		if at := c.texts(s.GetAttributes()); i == 0 {
			out.checkpoint = at["ckptstore.checkpoint"]
		}
	}
	slices.Sort(out.spans)
	out.id = fmt.Sprintf("%x", spans[0].GetTraceId())
	return out
}

// texts returns attributes with texts, and checks that no key comes twice.
func (c *receiver) texts(list []*common.KeyValue) map[string]string {
	out, seen := map[string]string{}, map[string]bool{}
	for _, a := range list {
		if a.GetKey() == "" || a.GetValue().GetValue() == nil || seen[a.GetKey()] {
			c.t.Errorf("attribute %v", a)
		}
		seen[a.GetKey()] = true
		out[a.GetKey()] = a.GetValue().GetStringValue()
	}
	return out
}

// next returns the next trace that the collector has taken.
func (c *receiver) next() trace {
	c.t.Helper()
	select {
	case got := <-c.traces:
		return got
	case <-time.After(time.Minute):
		c.t.Fatal("no trace")
		return trace{}
	}
}

// logged collects log lines.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements [io.Writer].
func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) count(part string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), part)
}

// tracer returns a tracer for a collector, which begins to send with start.
func (s *scene) tracer(endpoint string, log io.Writer, change ...func(map[string]string)) *Tracer {
	s.t.Helper()
	env := map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
	for _, f := range change {
		f(env)
	}
	c, err := FromEnvironment(func(name string) string { return env[name] })
	if err != nil {
		s.t.Fatal(err)
	}
	t := newTracer(s.store, c, Options{Version: "v1", Logger: slog.New(slog.NewTextHandler(log, nil))})
	t.pause, t.comeback, t.flush = time.Millisecond, time.Millisecond, time.Minute
	return t
}

// starts starts a tracer and waits until it follows the log.
func (s *scene) starts(t *Tracer) {
	s.t.Helper()
	t.start(s.t.Context())
	until(s.t, "the tracer follows the log", func() bool { return t.holds.Load() })
}

// until polls until a condition holds.
func until(t *testing.T, what string, holds func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("after a minute: not %s", what)
		}
	}
}
