package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// ageMeter runs this program's commands on an aged store.
type ageMeter struct {
	self string // the program
	dir  string // the store
	run  string // one of its runs
	save string // one of its checkpoints
	note func(format string, values ...any)
}

func newAgeMeter(aged agedStore, a *bench) (*ageMeter, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	return &ageMeter{self: self, dir: aged.dir, run: runName(aged.Runs / 2), note: func(format string, values ...any) {
		if !a.Quiet {
			fmt.Fprintf(a.Err, format+"\n", values...)
		}
	}}, nil
}

// patience bounds each step of the benchmark. The first opening of a large store builds
// its views, which takes minutes.
const agePatience = 20 * time.Minute

// settling is how long an owner must be idle before its memory is read.
const settling = 3 * time.Second

func (m *ageMeter) measure(ctx context.Context, b *ageBench, verify bool) error {
	// The first opening builds files that later ones use.
	begin := time.Now()
	listed, _, err := m.command(ctx, "ls", m.run, "--json")
	if err != nil {
		return err
	}
	b.Filled = time.Since(begin).Seconds()
	if m.save, err = newestOf(listed); err != nil {
		return err
	}
	m.note("first opening: %.3gs", b.Filled)
	gc := []string{"gc", "--policy", "last=50", "--json"}
	for _, of := range []struct {
		what string
		into *float64
		args []string
	}{
		{"ls", &b.Ls, []string{"ls", m.run, "--json"}},
		{"show", &b.Show, []string{"show", m.run + "@" + m.save, "--json"}},
		{"jobs", &b.Jobs, []string{"jobs", "--json"}},
		{"gc", &b.GC, gc},
	} {
		if *of.into, err = m.rounds(ctx, b.Rounds, of.what, func() (time.Duration, error) {
			began := time.Now()
			_, peak, err := m.command(ctx, of.args...)
			if of.what == "gc" {
				b.GCMemory = max(b.GCMemory, peak)
			}
			return time.Since(began), err
		}); err != nil {
			return err
		}
	}
	if b.Open, err = m.rounds(ctx, b.Rounds, "open", func() (time.Duration, error) { return m.open(ctx, syscall.SIGTERM) }); err != nil {
		return err
	}
	if b.OpenKill, err = m.rounds(ctx, b.Rounds, "open after kill", func() (time.Duration, error) { return m.open(ctx, syscall.SIGKILL) }); err != nil {
		return err
	}
	if b.Takeover, err = m.rounds(ctx, b.Rounds, "take-over", func() (time.Duration, error) { return m.takeover(ctx) }); err != nil {
		return err
	}
	if err := m.owned(ctx, b, gc); err != nil {
		return err
	}
	if verify {
		begin = time.Now()
		_, peak, err := m.command(ctx, "verify", "--log", "--json")
		if err != nil {
			return err
		}
		b.Verify, b.VerifyRSS = time.Since(begin).Seconds(), peak
		m.note("verify --log: %.3gs", b.Verify)
	}
	return nil
}

// rounds returns the median duration of do, in seconds.
func (m *ageMeter) rounds(ctx context.Context, n int, what string, do func() (time.Duration, error)) (float64, error) {
	took := make([]time.Duration, n)
	for i := range took {
		var err error
		if took[i], err = do(); err != nil {
			return 0, fmt.Errorf("%s: %w", what, err)
		}
		if err := ctx.Err(); err != nil {
			return 0, err
		}
	}
	m.note("%s: %v", what, took)
	return quantile(sorted(took), 0.5) / 1e3, nil
}

// owned measures an idle owner, and commands in parallel with it.
func (m *ageMeter) owned(ctx context.Context, b *ageBench, gc []string) (err error) {
	owner, err := m.serve(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, owner.end(syscall.SIGTERM)) }()
	if err := owner.answers(ctx); err != nil {
		return err
	}
	select {
	case <-time.After(settling):
	case <-ctx.Done():
		return ctx.Err()
	}
	if b.Owner, b.OwnerPeak, err = owner.memory(); err != nil {
		return err
	}
	for _, of := range []struct {
		what string
		into *float64
		args []string
	}{
		{"ls with an owner", &b.LsBeside, []string{"ls", m.run, "--json"}},
		{"gc with an owner", &b.GCBeside, gc},
	} {
		if *of.into, err = m.rounds(ctx, b.Rounds, of.what, func() (time.Duration, error) {
			began := time.Now()
			_, _, err := m.command(ctx, of.args...)
			return time.Since(began), err
		}); err != nil {
			return err
		}
	}
	b.OwnerGC, _, err = owner.memory()
	return err
}

// open returns how long an owner takes to answer after its predecessor ended by a
// signal.
func (m *ageMeter) open(ctx context.Context, end syscall.Signal) (took time.Duration, err error) {
	before, err := m.serve(ctx)
	if err != nil {
		return 0, err
	}
	if err := errors.Join(before.answers(ctx), before.end(end)); err != nil {
		return 0, err
	}
	begin := time.Now()
	owner, err := m.serve(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, owner.end(syscall.SIGTERM)) }()
	err = owner.answers(ctx)
	return time.Since(begin), err
}

// takeover returns the time from the kill of the owner until another process, which
// already had the store open, answers as the owner.
func (m *ageMeter) takeover(ctx context.Context) (took time.Duration, err error) {
	owner, err := m.serve(ctx)
	if err != nil {
		return 0, err
	}
	if err := owner.answers(ctx); err != nil {
		return 0, errors.Join(err, owner.end(syscall.SIGKILL))
	}
	next, err := m.serve(ctx)
	if err != nil {
		return 0, errors.Join(err, owner.end(syscall.SIGKILL))
	}
	defer func() { err = errors.Join(err, next.end(syscall.SIGTERM)) }()
	if err := next.says(ctx, "standing by"); err != nil {
		return 0, errors.Join(err, owner.end(syscall.SIGKILL))
	}
	begin := time.Now()
	if err := owner.end(syscall.SIGKILL); err != nil {
		return 0, err
	}
	err = next.answers(ctx)
	return time.Since(begin), err
}

// command runs one command to its end. It returns the command's output and the peak of
// its memory in bytes.
func (m *ageMeter) command(ctx context.Context, args ...string) (out []byte, peak int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, agePatience)
	defer cancel()
	c := exec.CommandContext(ctx, m.self, append([]string{"--store", m.dir, "--wait", "30s"}, args...)...)
	var stdout, stderr bytes.Buffer
	c.Stdout, c.Stderr = &stdout, &stderr
	if err := c.Start(); err != nil {
		return nil, 0, err
	}
	// The system's own figure for a process includes its parent's memory.
	ended := make(chan struct{})
	var watched sync.WaitGroup
	watched.Go(func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			if _, hwm, err := memoryOf(c.Process.Pid); err == nil {
				peak = max(peak, hwm)
			}
			select {
			case <-ended:
				return
			case <-tick.C:
			}
		}
	})
	err = c.Wait()
	close(ended)
	watched.Wait()
	if err != nil {
		err = fmt.Errorf("ckptstore %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return stdout.Bytes(), peak, err
}

// ageOwner is a process that serves the store or stands by.
type ageOwner struct {
	m      *ageMeter
	c      *exec.Cmd
	stderr *transcript
	done   chan error
}

func (m *ageMeter) serve(ctx context.Context) (*ageOwner, error) {
	o := &ageOwner{m: m, stderr: &transcript{}, done: make(chan error, 1)}
	o.c = exec.CommandContext(ctx, m.self, "--store", m.dir, "--wait", "30s", "serve")
	o.c.Stderr = o.stderr
	if err := o.c.Start(); err != nil {
		return nil, err
	}
	go func() { o.done <- o.c.Wait() }()
	return o, nil
}

// end ends the process with a signal and waits for it.
func (o *ageOwner) end(by syscall.Signal) error {
	if err := o.c.Process.Signal(by); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case err := <-o.done:
		var exit *exec.ExitError
		if errors.As(err, &exit) { // it was signalled
			return nil
		}
		return err
	case <-time.After(agePatience):
		return fmt.Errorf("process %d does not end by %s", o.c.Process.Pid, by)
	}
}

// until polls a condition. It fails if the process ends.
func (o *ageOwner) until(ctx context.Context, what string, is func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, agePatience)
	defer cancel()
	for !is() {
		select {
		case err := <-o.done:
			o.done <- err
			return fmt.Errorf("process %d ended before it %s: %w: %s", o.c.Process.Pid, what, err, o.stderr)
		case <-ctx.Done():
			return fmt.Errorf("process %d never %s: %w: %s", o.c.Process.Pid, what, ctx.Err(), o.stderr)
		case <-time.After(2 * time.Millisecond):
		}
	}
	return nil
}

func (o *ageOwner) says(ctx context.Context, text string) error {
	return o.until(ctx, "printed "+text, func() bool { return strings.Contains(o.stderr.String(), text) })
}

// answers waits until the process owns the store and answers a query.
func (o *ageOwner) answers(ctx context.Context) error {
	return o.until(ctx, "answered as the owner", func() bool {
		return o.asked("run?run="+o.m.run, o.c.Process.Pid)
	})
}

// memory returns the current and the peak memory of the process.
func (o *ageOwner) memory() (now, peak int64, err error) { return memoryOf(o.c.Process.Pid) }

func memoryOf(pid int) (now, peak int64, err error) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return 0, 0, err
	}
	for name, into := range map[string]*int64{"VmRSS:": &now, "VmHWM:": &peak} {
		_, after, found := strings.Cut(string(text), name)
		if !found {
			return 0, 0, fmt.Errorf("process %d: no %s in its status", pid, name)
		}
		fields := strings.Fields(after)
		if *into, err = strconv.ParseInt(fields[0], 10, 64); err != nil {
			return 0, 0, err
		}
		*into <<= 10
	}
	return now, peak, nil
}

// transcript collects the output of processes, and can be read at any time.
type transcript struct {
	mu   sync.Mutex
	text strings.Builder
}

func (t *transcript) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.text.Write(p)
}

func (t *transcript) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.text.String()
}

// newestOf returns the ID of the first checkpoint of a listing.
func newestOf(text []byte) (string, error) {
	var l struct {
		Checkpoints []struct {
			ID string `json:"id"`
		} `json:"checkpoints"`
	}
	if err := json.Unmarshal(text, &l); err != nil {
		return "", err
	}
	if len(l.Checkpoints) == 0 {
		return "", errors.New("the generated run has no checkpoint")
	}
	return l.Checkpoints[0].ID, nil
}

// blocksOf returns the disk space of a file in bytes.
func blocksOf(info fs.FileInfo) int64 {
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return s.Blocks * 512
	}
	return info.Size()
}
