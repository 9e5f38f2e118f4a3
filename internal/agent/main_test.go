package agent_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/agent"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/services"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// patience bounds the wait for expected events.
const patience = 60 * time.Second

// The test binary is also the agent that it starts, and members of its groups.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "agent":
			os.Exit(status(serve(os.Args[2:])))
		case "member":
			os.Exit(status(member(os.Args[2:])))
		case "start":
			os.Exit(status(start()))
		case "steady":
			os.Exit(status(steady(os.Args[2:])))
		case "startrank":
			os.Exit(status(startRank(os.Args[2:])))
		}
	}
	os.Exit(runTests(m))
}

func status(err error) int {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("/tmp", "ag") // short enough for sockets
	if err != nil {
		return status(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	for name, value := range map[string]string{"XDG_RUNTIME_DIR": dir, "GORACE": "atexit_sleep_ms=0"} {
		if err := os.Setenv(name, value); err != nil {
			return status(err)
		}
	}
	// These tests wait for processes more than they compute. A number on the command line takes
	// precedence.
	if err := flag.Set("test.parallel", "5"); err != nil {
		return status(err)
	}
	return m.Run()
}

// serve is the process of an agent.
func serve(args []string) (err error) {
	f := flag.NewFlagSet("agent", flag.ContinueOnError)
	cfg := agent.Config{Version: "test"}
	f.DurationVar(&cfg.Idle, "idle", 0, "")
	f.DurationVar(&cfg.Join, "join", patience, "")
	f.DurationVar(&cfg.Handover, "handover", patience, "")
	f.StringVar(&cfg.Shared, "shared", "", "")
	f.DurationVar(&cfg.Silence, "silence", 10*time.Second, "")
	launch := f.String("launch", "", "")
	memory := f.String("memory", "", "")
	if err := f.Parse(args); err != nil {
		return err
	}
	cfg.Session = session.Config{SaveTimeout: patience, DrainTimeout: patience, Collective: patience}
	if *memory != "" {
		if cfg.Session.StagingMemory, err = staging.ParseMemory(*memory); err != nil {
			return err
		}
	}
	cfg.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	at, err := store.Locate(ctx, store.Options{Location: os.Getenv(agent.EnvStore)})
	if err != nil {
		return err
	}
	release, err := agent.Hold(ctx, at, *launch, patience)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()
	options := store.Options{Location: os.Getenv(agent.EnvStore), Logger: cfg.Logger}
	var link *nodes.Link
	if *launch != "" {
		if link, err = agent.JoinLaunch(ctx, at, cfg, *launch); err != nil {
			return err
		}
		defer agent.LeaveLaunch(link)
		options.Owner = agent.Owner(at, link)
	}
	st, err := store.Open(ctx, options)
	if err != nil {
		return err
	}
	about := services.New(st, cfg.Logger)
	cfg.Services, cfg.Busy = about, about.Busy
	if link != nil {
		err = agent.NewFollower(cfg, st, *launch, link).Serve(ctx)
	} else {
		err = agent.New(cfg, st).Serve(ctx)
	}
	return errors.Join(err, about.Close(), st.Close())
}

// place is a store with the agents that a test starts for it.
type place struct {
	t  *testing.T
	at store.Whereabouts
	// shared is where its agents stage.
	shared string
}

func newPlace(t *testing.T) *place {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "store")
	if _, err := store.Init(t.Context(), dir, ""); err != nil {
		t.Fatal(err)
	}
	at, err := store.Locate(t.Context(), store.Options{Location: dir})
	if err != nil {
		t.Fatal(err)
	}
	shared, err := os.MkdirTemp("/dev/shm", "ag") //nolint:usetesting // t.TempDir is no memory
	if err != nil {
		t.Fatal(err)
	}
	p := &place{t, at, shared}
	t.Cleanup(func() {
		if c, _, err := agent.Find(context.Background(), at, ""); err == nil {
			if _, err := agent.Stop(context.Background(), c, agent.StopRequest{Now: true, Reason: "the test is over"}); err != nil {
				t.Error(err)
			}
			p.gone(c)
		}
		if t.Failed() {
			if log, err := os.ReadFile(filepath.Join(at.Runtime, "agent.log")); err == nil {
				t.Logf("agents:\n%s", log)
			}
		}
		_ = os.RemoveAll(shared)
	})
	return p
}

// start starts an agent of the place with some options.
func (p *place) start(args ...string) agent.Card {
	p.t.Helper()
	c, _, err := agent.Start(p.t.Context(), p.at, p.options(args...))
	if err != nil {
		p.t.Fatal(err)
	}
	return c
}

func (p *place) options(args ...string) agent.StartOptions {
	return agent.StartOptions{Program: "/proc/self/exe", Args: append([]string{"--shared=" + p.shared}, args...), Version: "test", Limit: patience}
}

// gone waits until an agent has ended.
func (p *place) gone(c agent.Card) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := agent.Gone(ctx, c); err != nil {
		p.t.Error(err)
	}
}

// open opens the store while its agent runs.
func (p *place) open() *store.Store {
	p.t.Helper()
	s, err := store.Open(p.t.Context(), store.Options{Location: p.at.Location, Patience: patience})
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() {
		if err := s.Close(); err != nil {
			p.t.Error(err)
		}
	})
	return s
}

// ended waits for the end of a job in the log.
func (p *place) ended(s *store.Store, job string) *events.JobEnded {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	for r, err := range s.Log.Read(ctx, 1, 0) {
		if err != nil {
			p.t.Fatalf("wait for the end of job %s: %v", job, err)
		}
		body, err := r.Body()
		if err != nil {
			p.t.Fatal(err)
		}
		if e, ok := body.(*events.JobEnded); ok && e.Job == job {
			return e
		}
	}
	return nil
}

// started returns the log's record of the start of a job.
func (p *place) started(s *store.Store, job string) projections.Job {
	p.t.Helper()
	rows, err := query.Ask(p.t.Context(), s.Views(), query.Launches, query.Params{Run: "real"})
	if err != nil {
		p.t.Fatal(err)
	}
	for _, row := range rows {
		for _, j := range row.Jobs {
			if j.ID == job {
				return j
			}
		}
	}
	p.t.Fatalf("the log has no job %s", job)
	return projections.Job{}
}

func (p *place) trial(s *store.Store, run string) projections.Trial {
	p.t.Helper()
	got, err := query.Ask(p.t.Context(), s.Views(), query.Trial, query.Params{Run: run, Trial: projections.DefaultTrial})
	if err != nil {
		p.t.Fatal(err)
	}
	return got
}

// refused is a reply with a status other than 200.
type refused struct {
	status int
	text   string
}

func (r *refused) Error() string { return fmt.Sprintf("%d: %s", r.status, r.text) }

// post makes one request and decodes its reply.
func post[Out any](ctx context.Context, socket, token, name string, in any) (out Out, err error) {
	body, err := json.Marshal(in)
	if err != nil {
		return out, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://agent/v1/"+name, bytes.NewReader(body))
	if err != nil {
		return out, err
	}
	r.Header.Set("Authorization", "Bearer "+token)
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
	reply, err := (&http.Client{Transport: transport}).Do(r)
	if err != nil {
		return out, err
	}
	defer func() { _ = reply.Body.Close() }()
	if reply.StatusCode != http.StatusOK {
		var p client.Problem
		if err := json.NewDecoder(reply.Body).Decode(&p); err != nil {
			return out, err
		}
		return out, &refused{reply.StatusCode, p.Message}
	}
	return out, json.NewDecoder(reply.Body).Decode(&out)
}

// wants fails the test unless err is a refusal with the status and the words.
func wants(t *testing.T, err error, status int, words ...string) {
	t.Helper()
	var r *refused
	if !errors.As(err, &r) || r.status != status {
		t.Errorf("error %v, want status %d with %q", err, status, words)
		return
	}
	for _, w := range words {
		if !strings.Contains(r.text, w) {
			t.Errorf("error %q does not have %q", r.text, w)
		}
	}
}

// sleeper is a process on whose behalf the test makes requests.
func sleeper(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kill(cmd) })
	return cmd
}

// kill ends a process and reaps it.
func kill(cmd *exec.Cmd) {
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
}
