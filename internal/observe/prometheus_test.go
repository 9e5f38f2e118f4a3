package observe

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/store"
)

// envPrometheus names the directory with the programs prometheus and promtool, where they are not on
// the PATH.
const envPrometheus = "CKPTSTORE_PROMETHEUS"

// program returns the path of prometheus or promtool. Without them, the test does not run.
func program(t *testing.T, name string) string {
	t.Helper()
	if dir := os.Getenv(envPrometheus); dir != "" {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); err != nil {
			t.Fatalf("%s: %v", envPrometheus, err)
		}
		return path
	}
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("not run: there is no %s: install Debian's package prometheus, or name the directory of its programs in $%s", name, envPrometheus) //nolint:forbidigo // a server that most machines lack
	}
	return path
}

// promtool runs promtool and returns its output.
func promtool(t *testing.T, stdin string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program(t, "promtool"), args...)
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// TestPromtool lets promtool judge the alerts, and check that each fires for its fault and not
// without it.
func TestPromtool(t *testing.T) {
	t.Parallel()
	program(t, "promtool")
	promtool(t, "", "check", "rules", "--lint-fatal", alertsFile)
	rules, err := filepath.Abs(alertsFile)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join("testdata", "alerts_test.yml"))
	if err != nil {
		t.Fatal(err)
	}
	tests := filepath.Join(t.TempDir(), "alerts_test.yml")
	if err := os.WriteFile(tests, bytes.Replace(text, []byte("RULES"), []byte(rules), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	promtool(t, "", "test", "rules", tests)
	for _, a := range readAlerts(t) {
		if !bytes.Contains(text, []byte(`"`+a.Alert+`"`)) {
			t.Errorf("no test of promtool has %s", a.Alert)
		}
	}
}

// server is a Prometheus that scrapes each second.
type server struct {
	t   *testing.T
	url string
}

// startPrometheus starts a Prometheus that scrapes a target, with the alerts of this repository.
func startPrometheus(t *testing.T, target string) server {
	t.Helper()
	path := program(t, "prometheus")
	dir := t.TempDir()
	rules, err := filepath.Abs(alertsFile)
	if err != nil {
		t.Fatal(err)
	}
	config := fmt.Sprintf("global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [%q]\nscrape_configs:\n  - job_name: ckptstore\n    static_configs: [{targets: [%q]}]\n", rules, target)
	if err := os.WriteFile(filepath.Join(dir, "prometheus.yml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "--config.file="+filepath.Join(dir, "prometheus.yml"), "--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address="+address, "--log.level=warn")
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("prometheus:\n%s", &log)
		}
	})
	return server{t, "http://" + address}
}

// get asks the server's API for a path; false while it does not answer.
func (s server) get(ctx context.Context, path string, into any) bool {
	s.t.Helper()
	text, err := fetch(ctx, s.url+path)
	if err != nil {
		return false
	}
	if err := json.Unmarshal(text, into); err != nil {
		s.t.Fatalf("%s: %v", text, err)
	}
	return true
}

// series returns how many series a query has.
func (s server) series(ctx context.Context, expr string) int {
	var answer struct {
		Status, Error string
		Data          struct{ Result []json.RawMessage }
	}
	if !s.get(ctx, "/api/v1/query?query="+url.QueryEscape(expr), &answer) {
		return 0
	}
	return len(answer.Data.Result)
}

// until polls until a condition holds, for two minutes at most.
func until(t *testing.T, what string, holds func(context.Context) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for !holds(ctx) {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("after two minutes: not %s", what)
		}
	}
}

// TestPrometheus lets a real Prometheus scrape a store. Each query of the dashboard then has
// series, and the alerts that need no long time fire by events of the log.
func TestPrometheus(t *testing.T) {
	t.Parallel()
	program(t, "prometheus")
	s := newScene(t, time.Now().Add(-5*time.Minute).Truncate(time.Second))
	job := s.story("bert")
	_, release, err := s.store.HoldRun(t.Context(), "bert", job)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = release() }()
	nodes := store.NewID()
	s.add("nodes", nodes, twoNodes(nodes)...)
	s.add("nodes", nodes, groupOfTwo(1, nodes), slowNode(nodes, 1, 1, false))
	_, releaseNodes, err := s.store.HoldRun(t.Context(), "nodes", nodes)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = releaseNodes() }()
	_, sub, err := s.store.Subscribe(t.Context(), "mail")
	if err != nil {
		t.Fatal(err)
	}
	sub.Handled(3)
	if err := sub.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	web := httptest.NewServer(Handler(s.store, Options{Version: "v1", Traces: s.tracer()}))
	defer web.Close()
	text, err := fetch(t.Context(), web.URL+"/metrics")
	if err != nil {
		t.Fatal(err)
	}
	promtool(t, string(text), "check", "metrics")

	p := startPrometheus(t, strings.TrimPrefix(web.URL, "http://"))
	until(t, "scraped three times", func(ctx context.Context) bool { return p.series(ctx, `count_over_time(ckptstore_owner[5m]) >= 3`) == 1 })
	for _, q := range readPanels(t) {
		until(t, "a series of "+q.where+": "+q.expr, func(ctx context.Context) bool { return p.series(ctx, q.expr) > 0 })
	}
	for _, f := range families() {
		for _, suffix := range suffixes[f.kind] {
			if name := prefix + f.name + suffix; p.series(t.Context(), name) == 0 {
				t.Errorf("%s has no series", name)
			}
		}
	}

	s.add(
		"bert", job,
		&events.CheckpointAborted{Attempt: 2, Checkpoint: "step-30.a2", Reason: "no room"},
		&events.RestoreBegun{Attempt: 2, Load: 2, Checkpoint: "step-20.a2"},
		&events.RestoreFailed{Attempt: 2, Load: 2, Checkpoint: "step-20.a2", Error: "block 3 is damaged"},
		&events.GroupStopped{Attempt: 2, Failure: "worker"},
	)
	for attempt := 3; attempt < 7; attempt++ {
		s.add("bert", job, &events.GroupStarted{Attempt: attempt, Job: job, WorldSize: 1, Resume: "step-20.a2"}, &events.GroupStopped{Attempt: attempt, Failure: "worker"})
	}
	for _, name := range []string{"CkptstoreSaveAborted", "CkptstoreRestoreFailed", "CkptstoreCrashLoop", "CkptstoreGPUUnhealthy"} {
		until(t, "firing: "+name, func(ctx context.Context) bool {
			return p.series(ctx, fmt.Sprintf(`ALERTS{alertname=%q,alertstate="firing"}`, name)) == 1
		})
	}
	var rules struct {
		Data struct {
			Groups []struct {
				Rules []struct{ Name, Health, LastError string }
			}
		}
	}
	if !p.get(t.Context(), "/api/v1/rules", &rules) || len(rules.Data.Groups) != 1 {
		t.Fatalf("rules %+v", rules)
	}
	for _, r := range rules.Data.Groups[0].Rules {
		if r.Health != "ok" {
			t.Errorf("%s is %s: %s", r.Name, r.Health, r.LastError)
		}
	}
	if n := len(rules.Data.Groups[0].Rules); n != len(readAlerts(t)) {
		t.Errorf("%d rules are evaluated", n)
	}
}

// fetch returns the body of a page.
func fetch(ctx context.Context, page string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, page, nil)
	if err != nil {
		return nil, err
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return nil, err
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", answer.Status, text)
	}
	return text, err
}
