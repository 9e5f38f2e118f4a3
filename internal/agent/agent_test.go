package agent_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/agent"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/redact"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// member is a process that joins, loads the checkpoint if there is one, saves,
// and leaves or just ends.
func member(args []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	n, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	var c agent.Card
	if err := json.Unmarshal([]byte(args[0]), &c); err != nil {
		return err
	}
	r := request(args[1], "real", n, 2, os.Getpid())
	r.Config = map[string]any{"hf_token": "SECRET"}
	j, err := post[agent.JoinReply](ctx, c.Socket, c.Token, "join", r)
	if err != nil {
		return err
	}
	for name, value := range map[string]string{client.EnvSocket: j.Socket, client.EnvToken: j.Token} {
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	w, err := client.Connect(ctx)
	if err != nil {
		return err
	}
	defer w.Close()
	state := client.State{Values: []client.Value{{FQN: "v", PerRank: true, Data: fmt.Appendf(nil, "rank %d", n)}}}
	if j.Resume != "" {
		got := client.State{Values: []client.Value{{FQN: "v", PerRank: true}}}
		if _, err := w.Load(ctx, &got, client.LoadOptions{Strict: true}); err != nil {
			return err
		}
		if string(got.Values[0].Data) != fmt.Sprintf("rank %d", n) {
			return fmt.Errorf("rank %d has loaded %q", n, got.Values[0].Data)
		}
	}
	if err := w.Report(ctx, int64(j.Attempt), map[string]any{"loss": 0.5}); err != nil {
		return err
	}
	s, err := w.Save(ctx, int64(j.Attempt), state, client.SaveOptions{})
	if err != nil {
		return err
	}
	fmt.Println(s.Checkpoint, j.Job, j.Resume)
	if args[3] == "leave" {
		_, err = post[struct{}](ctx, j.Socket, j.Token, "leave", struct{}{})
	}
	return err
}

// run runs two members and returns the checkpoint and the job.
func run(t *testing.T, c agent.Card, how string) (checkpoint, job, resume string) {
	t.Helper()
	return runAt(t, []agent.Card{c, c}, how)
}

// runAt is run for two members with an agent each.
func runAt(t *testing.T, at []agent.Card, how string) (checkpoint, job, resume string) {
	t.Helper()
	var members sync.WaitGroup
	said := make([]string, 2)
	for n, c := range at {
		card, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		members.Go(func() {
			cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "member", string(card), "one key", strconv.Itoa(n), how, "--api-key=SECRET")
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("rank %d: %v\n%s", n, err, out)
			}
			said[n] = string(out)
		})
	}
	members.Wait()
	words := strings.Split(strings.TrimSuffix(said[0], "\n"), " ")
	if said[0] != said[1] || len(words) != 3 {
		t.Fatalf("the ranks' output: %q", said)
	}
	return words[0], words[1], words[2]
}

// Processes without a trainer save and load as the ranks of a job. Their staged
// saves are committed after they are gone, and the job ends. Under the same key
// they are another attempt, which resumes.
func TestProcessesJoin(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	c := p.start()
	s := p.open()
	first, job, resume := run(t, c, "leave")
	if resume != "" {
		t.Errorf("the first session resumes from %q", resume)
	}
	if e := p.ended(s, job); e.ExitCode != 0 || e.Reason != "" {
		t.Errorf("the first job ended with %+v", e)
	}
	if trial := p.trial(s, "real"); trial.Head != first || trial.Status != projections.Paused {
		t.Errorf("after the first session: %+v, want %s and paused", trial, first)
	} else if trial.Config["hf_token"] != redact.Mark {
		t.Errorf("the log has the configuration %v", trial.Config)
	}
	if command := p.started(s, job).Command; command[len(command)-1] != "--api-key="+redact.Mark {
		t.Errorf("the log has the command %q", command)
	}
	second, job, resume := run(t, c, "vanish")
	if resume != first {
		t.Errorf("the second session resumes from %q, want %q", resume, first)
	}
	if e := p.ended(s, job); e.ExitCode != 1 || !strings.Contains(e.Reason, "without leaving") {
		t.Errorf("the second job ended with %+v", e)
	}
	if trial := p.trial(s, "real"); trial.Head != second || trial.Attempt != 2 {
		t.Errorf("after the second session: %+v, want %s", trial, second)
	}
	workers, err := query.Ask(t.Context(), s.Views(), query.Workers, query.Params{Run: "real", Trial: projections.DefaultTrial, Attempt: 2})
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range workers {
		if w.State != projections.Exited || !w.Unseen || w.Code != -1 {
			t.Errorf("worker %+v: unobserved end", w)
		}
	}
}

func TestAbsentRankIsNamed(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	c := p.start("--join=300ms")
	_, err := post[agent.JoinReply](t.Context(), c.Socket, c.Token, "join", request("k", "r", 1, 3, os.Getpid()))
	wants(t, err, http.StatusGatewayTimeout, "ranks [0 2] of 3", `run "r"`, strconv.Itoa(os.Getpid()))
}

func TestWrongRequests(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	c := p.start()
	ask := func(change func(*agent.JoinRequest)) error {
		r := request("k", "r", 0, 1, os.Getpid())
		change(&r)
		_, err := post[agent.JoinReply](t.Context(), c.Socket, c.Token, "join", r)
		return err
	}
	ended := exec.Command("true")
	if err := ended.Run(); err != nil {
		t.Fatal(err)
	}
	wants(t, ask(func(r *agent.JoinRequest) { r.PID = ended.Process.Pid }), http.StatusConflict, "is gone")
	wants(t, ask(func(r *agent.JoinRequest) { r.Protocols = []int{99} }), http.StatusBadRequest, "[99]", "version test", "[3]", "ckptstore agent stop")
	wants(t, ask(func(r *agent.JoinRequest) { r.Rank = 1 }), http.StatusBadRequest, "rank 1")
	wants(t, ask(func(r *agent.JoinRequest) { r.Key = "" }), http.StatusBadRequest, "key")
	wants(t, ask(func(r *agent.JoinRequest) { r.Run = "" }), http.StatusBadRequest, "empty")
	wants(t, ask(func(r *agent.JoinRequest) { r.Resume = "require" }), http.StatusBadRequest, "no committed checkpoint")
	_, err := post[agent.Status](t.Context(), c.Socket, "wrong", "status", struct{}{})
	wants(t, err, http.StatusUnauthorized, "agent.json")
	_, err = post[agent.Status](t.Context(), c.Socket, c.Token, "save", struct{}{})
	wants(t, err, http.StatusNotFound, "join")
	for _, name := range []string{"agent.sock", "agent.json"} {
		info, err := os.Stat(filepath.Join(p.at.Runtime, name))
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v, want it for this user alone", name, info.Mode(), err)
		}
	}
}

// start is a process that starts an agent and prints its PID.
func start() error {
	at, err := store.Locate(context.Background(), store.Options{Location: os.Getenv(agent.EnvStore)})
	if err != nil {
		return err
	}
	c, _, err := agent.Start(context.Background(), at, agent.StartOptions{Program: "/proc/self/exe", Limit: patience})
	fmt.Println(c.PID)
	return err
}

func TestManyStartOneAgent(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	var starts sync.WaitGroup
	pids := make([]string, 5)
	for i := range pids {
		starts.Go(func() {
			cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "start")
			cmd.Env = append(os.Environ(), agent.EnvStore+"="+p.at.Location)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%v\n%s", err, out)
			}
			pids[i] = string(out)
		})
	}
	starts.Wait()
	log, err := os.ReadFile(filepath.Join(p.at.Runtime, "agent.log"))
	if err != nil || strings.Count(string(log), "agent serves") != 1 || strings.Contains(string(log), "another agent") {
		t.Errorf("more than one agent was started: %v\n%s", err, log)
	}
	for _, pid := range pids {
		if pid != pids[0] {
			t.Errorf("the agents are %q", pids)
		}
	}
}

func TestStopsIdle(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	const idle = 2 * time.Second // a slow machine must start the agent and join in it
	c := p.start("--idle=" + idle.String())
	ranks := join(t, c, "k", "r", 1)
	joined := time.Now()
	await(t, func() bool { return time.Since(joined) > idle+idle/4 }) // the agent must not stop in this time
	commit(t, ranks, 1)
	ranks[0].leave()
	p.gone(c)
	if _, _, err := agent.Find(t.Context(), p.at, ""); err == nil || !strings.Contains(err.Error(), "agent start") {
		t.Errorf("the agent that has stopped: %v", err)
	}
	if again := p.start(); again.PID == c.PID {
		t.Error("the same process serves")
	}
}

// An agent that is asked to stop takes no new sessions and ends with the last.
func TestStopWaitsForSessions(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	c := p.start()
	ranks := join(t, c, "k", "r", 1)
	s, err := agent.Stop(t.Context(), c, agent.StopRequest{Reason: "an upgrade"})
	if err != nil || s.Stopping != "an upgrade" || len(s.Sessions) != 1 || s.Sessions[0].PIDs[0] != ranks[0].proc.Process.Pid {
		t.Errorf("status %+v %v", s, err)
	}
	_, err = post[agent.JoinReply](t.Context(), c.Socket, c.Token, "join", request("l", "other", 0, 1, os.Getpid()))
	wants(t, err, http.StatusServiceUnavailable, "stopping (an upgrade)")
	o := p.options()
	o.Limit = 300 * time.Millisecond
	if _, _, err := agent.Start(t.Context(), p.at, o); err == nil || !strings.Contains(err.Error(), "stopping") {
		t.Errorf("start while an agent is stopping: %v", err)
	}
	id := commit(t, ranks, 1)
	ranks[0].leave()
	p.gone(c)
	if trial := p.trial(p.open(), "r"); trial.Head != id {
		t.Errorf("head %q, want %s", trial.Head, id)
	}
}

// Saves that all ranks have sealed are finished when the agent is asked to stop
// now, and the ranks still get the result.
func TestStopNowFinishesWhatIsStaged(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	c := p.start()
	ranks := join(t, c, "k", "r", 2)
	saves := together(ranks, func(r *rank) client.SaveReply { return r.begin(1, 32<<20) })
	ranks[0].wait(saves[0].Checkpoint, client.Begun)
	for n, r := range ranks {
		r.seal(saves[n])
	}
	asks := ranks[0].asks(saves[0].Checkpoint, client.Committed)
	waited := ranks[1].waits(saves[1].Checkpoint, client.Committed)
	if err := syscall.Kill(c.PID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	await(t, func() bool { // all saves are finished, and the session's sockets are closed
		conn, err := net.Dial("unix", ranks[0].Socket)
		if err == nil {
			_ = conn.Close()
		}
		return err != nil
	})
	if got, err := asks(); err != nil || got.State != client.Committed {
		t.Errorf("the slow rank's result: %+v, %v", got, err)
	}
	p.gone(c)
	if got, err := waited(); err != nil || got.State != client.Committed {
		t.Errorf("the rank's result: %+v, %v", got, err)
	}
	s := p.open()
	if trial := p.trial(s, "r"); trial.Head != saves[0].Checkpoint || trial.Status != projections.Paused {
		t.Errorf("trial %+v, want %s and paused", trial, saves[0].Checkpoint)
	}
	if e := p.ended(s, ranks[0].Job); !strings.Contains(e.Reason, "asked to stop") {
		t.Errorf("job ended: %+v", e)
	}
	if ranks[0].proc.ProcessState != nil || syscall.Kill(ranks[0].proc.Process.Pid, 0) != nil {
		t.Error("a member was ended")
	}
}

// A rank that waits for another gets an error.
func TestStopNowEndsWaiting(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	c := p.start()
	ranks := join(t, c, "k", "r", 2)
	asked := make(chan error, 1)
	ctx, sent := written(t.Context())
	go func() {
		_, err := post[client.LoadReply](ctx, ranks[0].Socket, ranks[0].Token, "load", client.LoadRequest{})
		asked <- err
	}()
	select {
	case <-sent:
	case <-time.After(patience):
		t.Fatal("the request is not sent")
	}
	must[struct{}](ranks[0], "heartbeat", struct{}{}) // connections are accepted in order
	if err := syscall.Kill(c.PID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.gone(c)
	if err := <-asked; err == nil || !strings.Contains(err.Error(), "the session is over") {
		t.Errorf("error %v, want that the session is over", err)
	}
}

// A save during which a member is killed is aborted and names it. The other
// members live but have no collectives any more. The next group waits for their
// end, and resumes.
func TestMemberKilledInASave(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	c := p.start()
	ranks := join(t, c, "k0", "r", 2)
	first := commit(t, ranks, 1)
	saves := together(ranks, func(r *rank) client.SaveReply { return r.begin(2, 100) })
	ranks[0].seal(saves[0])
	kill(ranks[1].proc)
	if got := ranks[0].wait(saves[0].Checkpoint, client.Committed); got.State != client.Aborted || !strings.Contains(got.Reason, "rank 1") {
		t.Errorf("the save of a dead rank: %+v", got)
	}
	_, err := post[client.ReportReply](t.Context(), ranks[0].Socket, ranks[0].Token, "load", client.LoadRequest{})
	wants(t, err, http.StatusConflict, "rank 1", "without leaving")
	if err := syscall.Kill(ranks[0].proc.Process.Pid, 0); err != nil {
		t.Errorf("the other member: %v", err)
	}
	next := make(chan []*rank, 1)
	go func() {
		defer close(next) // even if it cannot join
		next <- join(t, c, "k1", "r", 2)
	}()
	await(t, func() bool { // both wait
		s, err := agent.Ask(t.Context(), c, false)
		return err == nil && len(s.Sessions) == 2
	})
	ranks[0].leave()
	again := <-next
	if again == nil {
		t.Fatal("the next group cannot join")
	}
	if again[0].Resume != first || again[0].Attempt != 2 {
		t.Errorf("the next group has %+v, want attempt 2 from %s", again[0].JoinReply, first)
	}
}

func await(t *testing.T, so func() bool) {
	t.Helper()
	limit := time.After(patience)
	for !so() {
		select {
		case <-limit:
			t.Fatal("it does not come")
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func TestRunInUse(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	c := p.start()
	ranks := join(t, c, "k", "r", 1)
	pid := ranks[0].proc.Process.Pid
	_, err := post[agent.JoinReply](t.Context(), c.Socket, c.Token, "join", request("other", "r", 0, 1, os.Getpid()))
	wants(t, err, http.StatusConflict, ranks[0].Job, strconv.Itoa(pid), "choose another run name")
	_, err = post[agent.JoinReply](t.Context(), c.Socket, c.Token, "join", request("k", "r", 0, 1, os.Getpid()))
	wants(t, err, http.StatusConflict, strconv.Itoa(pid), "its own key")
	_, err = post[agent.JoinReply](t.Context(), c.Socket, c.Token, "join", request("k", "s", 0, 1, os.Getpid()))
	wants(t, err, http.StatusConflict, "run s", "others of its key with r")
	again, err := post[agent.JoinReply](t.Context(), c.Socket, c.Token, "join", request("k", "r", 0, 1, pid))
	if err != nil || again != ranks[0].JoinReply {
		t.Errorf("who has lost the reply gets %+v %v, want %+v", again, err, ranks[0].JoinReply)
	}
	// According to the log, a trainer has it.
	_, release, err := p.open().HoldRun(t.Context(), "held", store.NewID())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = release() }()
	_, err = post[agent.JoinReply](t.Context(), c.Socket, c.Token, "join", request("h", "held", 0, 1, os.Getpid()))
	wants(t, err, http.StatusConflict, "is being run by job", "choose another run name")
}

// After an agent is killed, the next one finds the saves that all ranks had
// sealed, and commits them.
func TestAgentKilled(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	c := p.start()
	ranks := join(t, c, "k", "r", 2)
	commit(t, ranks, 1)
	saves := together(ranks, func(r *rank) client.SaveReply { return r.begin(2, 1000) })
	ranks[0].wait(saves[0].Checkpoint, client.Begun)
	if err := syscall.Kill(c.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for n, r := range ranks {
		r.mark(saves[n])
	}
	p.gone(c)
	if _, _, err := agent.Find(t.Context(), p.at, ""); err == nil || !strings.Contains(err.Error(), "was killed") {
		t.Errorf("the agent that was killed: %v", err)
	}
	again := join(t, p.start(), "k", "r", 2)
	if again[0].Resume != saves[0].Checkpoint || again[0].Attempt != 2 {
		t.Errorf("after the kill: %+v, want to continue from %s", again[0].JoinReply, saves[0].Checkpoint)
	}
	loaded := together(again, func(r *rank) client.LoadReply {
		return must[client.LoadReply](r, "load", client.LoadRequest{Strict: true, Items: []client.Item{{FQN: "v", Value: true, PerRank: true}}})
	})
	for n, l := range loaded {
		data := make([]byte, l.Sizes[0])
		f, err := os.Open(l.Arenas[l.In[0]].Path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.ReadAt(data, l.Offsets[0]); err != nil || len(data) != 1000 || data[999] != byte(n+2) {
			t.Errorf("rank %d has loaded %d bytes: %v", n, len(data), err)
		}
		_ = f.Close()
	}
}

// A save without memory is refused with the directory that is full, and harms no
// other save.
func TestNoMemory(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	ranks := join(t, p.start("--memory=1MiB"), "k", "r", 1)
	_, err := post[client.SaveReply](t.Context(), ranks[0].Socket, ranks[0].Token, "save",
		client.SaveRequest{Step: 1, Items: []client.Item{{FQN: "v", Value: true, Bytes: 4 << 20}}})
	wants(t, err, http.StatusInsufficientStorage, "--staging-memory")
	commit(t, ranks, 2)
}

// A trial is completed when all ranks report so.
func TestDone(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	ranks := join(t, p.start(), "k", "r", 2)
	together(ranks, func(r *rank) client.ReportReply {
		return must[client.ReportReply](r, "report", client.Report{Step: 1, Metrics: map[string]any{"loss": 1.0}, Done: true})
	})
	ranks[0].leave()
	ranks[0].leave() // leaving again is harmless
	_, err := post[client.SaveReply](t.Context(), ranks[0].Socket, ranks[0].Token, "save", client.SaveRequest{Step: 3})
	wants(t, err, http.StatusGone, "has left")
	ranks[1].leave()
	s := p.open()
	if e := p.ended(s, ranks[0].Job); e.ExitCode != 0 {
		t.Errorf("job ended: %+v", e)
	}
	if trial := p.trial(s, "r"); trial.Status != projections.Completed {
		t.Errorf("trial %+v, want it completed", trial)
	}
}
