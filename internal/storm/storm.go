package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/internal/storm/check"
)

// pythonWorker is the worker through the Python package.
const pythonWorker = "worker.py"

//go:embed worker.py
var pythonText []byte

// Times of a storm in addition to its duration.
const (
	longestStop = 12 * time.Second // of a stopped process
	endLimit    = 3 * time.Minute  // for all jobs to end when asked
	goneLimit   = 30 * time.Second // for their processes to be gone after that
	calmLimit   = 4 * time.Minute  // for a last, undisturbed life of each run
)

// storm is one storm over one store.
type storm struct {
	options
	mark  string // of its processes
	store string
	acks  string
	began time.Time
	diary *os.File
	env   []string
	runs  []*trainedRun

	mu       sync.Mutex
	hits     []hit
	findings []string
	figures  figures
	backups  []backup
	cuts     map[string]bool // names of the live stream that were observed

	verbs     sync.Once
	canBackup bool
}

// figures are the output of a storm.
type figures struct {
	Seed     uint64  `json:"seed"`
	Seconds  float64 `json:"seconds"` // of the storm itself
	All      float64 `json:"seconds_in_all"`
	Lives    int     `json:"lives"`    // of trainers
	Sessions int     `json:"sessions"` // groups of processes that joined an agent

	Kills    map[string]int `json:"kills"`    // SIGKILL, by the kind of the process
	Stops    map[string]int `json:"stops"`    // SIGSTOP, then SIGCONT
	Asked    map[string]int `json:"asked"`    // SIGTERM and SIGUSR1
	Commands map[string]int `json:"commands"` // in parallel with the jobs
	// Refused counts commands that failed, by their exit code, without being killed and
	// without finding damage.
	Refused map[string]int `json:"refused"`
	Exits   map[string]int `json:"exits"` // of trainers
	// Unexplained counts exits of trainers that none of the storm's actions explain.
	Unexplained int `json:"unexplained_exits"`

	Cuts        int          `json:"log_cuts"`
	Backups     int          `json:"backups"`
	LogEvents   uint64       `json:"log_events"`
	ViewsEqual  bool         `json:"views_equal"`
	StagingLeft int          `json:"staging_left"`
	Left        int          `json:"processes_left"`
	Check       check.Result `json:"check"`
	// Backup describes the newest backup, and Restored the store restored from it.
	Backup   *check.Result `json:"backup_check,omitempty"`
	Restored *check.Result `json:"restored_check,omitempty"`
	Findings []string      `json:"findings"`
}

func newStorm(o options) (*storm, error) {
	s := &storm{
		options: o, mark: fmt.Sprintf("%x-%d", o.seed, os.Getpid()), began: time.Now(), cuts: map[string]bool{},
		figures: figures{
			Seed: o.seed, Kills: map[string]int{}, Stops: map[string]int{}, Asked: map[string]int{},
			Commands: map[string]int{}, Refused: map[string]int{}, Exits: map[string]int{}, Findings: []string{},
		},
	}
	var err error
	if s.source, err = filepath.Abs(o.source); err != nil {
		return nil, err
	}
	if s.dir == "" {
		s.dir, err = os.MkdirTemp("", "storm-")
	} else if s.dir, err = filepath.Abs(s.dir); err == nil {
		err = os.Mkdir(s.dir, 0o700)
	}
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"acks", "logs", "run"} {
		if err := os.Mkdir(filepath.Join(s.dir, name), 0o700); err != nil {
			return nil, err
		}
	}
	if err := os.WriteFile(filepath.Join(s.dir, pythonWorker), pythonText, 0o600); err != nil {
		return nil, err
	}
	s.store, s.acks = filepath.Join(s.dir, "store"), filepath.Join(s.dir, "acks")
	s.diary, err = os.OpenFile(filepath.Join(s.dir, "storm.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	return s, err
}

// run runs a whole storm: the programs, the storm, the calm after it, the checks.
func (s *storm) run(ctx context.Context) (err error) {
	fmt.Fprintf(os.Stderr, "storm: seed %d, %s in %s\n", s.seed, s.duration, s.dir)
	defer func() {
		s.killAll()
		err = errors.Join(err, s.diary.Close())
		if err != nil || s.keep {
			fmt.Fprintf(os.Stderr, "storm: %s is kept; repeat with --seed %d\n", s.dir, s.seed)
			return
		}
		err = os.RemoveAll(s.dir)
	}()
	if err := s.build(ctx); err != nil {
		return err
	}
	if out, err := s.ckptstore(ctx, "init").CombinedOutput(); err != nil {
		return fmt.Errorf("init: %w: %s", err, out)
	}
	s.began = time.Now()
	s.blow(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	s.figures.Seconds = time.Since(s.began).Seconds()
	s.calm(ctx)
	if err := s.judge(ctx); err != nil {
		s.find("%v", err)
	}
	s.leftovers()
	return s.print()
}

// build builds the programs, unless a directory of programs is given, and the
// environment of all processes.
func (s *storm) build(ctx context.Context) error {
	if s.bin == "" {
		s.bin = filepath.Join(s.dir, "bin")
		cmd := exec.CommandContext(ctx, "go", "build", "-o", s.bin+"/", "./cmd/ckptstore", "./cmd/trainer")
		cmd.Dir = s.source
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build the programs: %w\n%s", err, out)
		}
	}
	var err error
	if s.bin, err = filepath.Abs(s.bin); err != nil {
		return err
	}
	// Sockets need a short path. The directory is removed with its contents.
	runtimeDir, err := os.MkdirTemp("/tmp", "ck")
	if err != nil {
		return err
	}
	s.env = append(os.Environ(),
		envMark+"="+s.mark, "XDG_RUNTIME_DIR="+runtimeDir, "XDG_STATE_HOME="+filepath.Join(runtimeDir, "state"), "CKPTSTORE_BIN="+filepath.Join(s.bin, "ckptstore"),
		"PYTHONPATH="+filepath.Join(s.source, "python", "src"), "PATH="+s.bin+":"+os.Getenv("PATH"))
	if s.cut > 0 {
		s.env = append(s.env, fmt.Sprint("CKPTSTORE_TEST_CUT_EVENTS=", s.cut))
	}
	return nil
}

// runtimeDir returns the directory of sockets of this storm's processes.
func (s *storm) runtimeDir() string {
	for _, e := range s.env {
		if dir, ok := strings.CutPrefix(e, "XDG_RUNTIME_DIR="); ok && strings.HasPrefix(dir, "/tmp/ck") {
			return dir
		}
	}
	return ""
}

// ckptstore returns a command of the store. A signal to it reaches no other process; it
// does not outlive the storm.
func (s *storm) ckptstore(ctx context.Context, args ...string) *exec.Cmd {
	return s.command(ctx, filepath.Join(s.bin, "ckptstore"), append(args, "--store", s.store, "--wait", waitForOwner)...)
}

func (s *storm) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env, cmd.Dir = s.env, s.dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = 20 * time.Second
	return cmd
}

// blow runs the storm: jobs that are started again and again, and the actors that
// disturb them.
func (s *storm) blow(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, s.duration)
	defer cancel()
	s.runs = []*trainedRun{{name: "one", world: 1}, {name: "two", world: 2}, {name: "three", world: 3}}
	if s.python != "" {
		s.runs = append(s.runs, &trainedRun{name: "python", world: 2, python: true})
	}
	var jobs, actors sync.WaitGroup
	for i, r := range s.runs {
		jobs.Go(func() { s.liveOn(ctx, r, s.random(uint64(100+i))) })
	}
	jobs.Go(func() { s.joinOn(ctx, "joined", 2, s.random(200)) })
	for i, act := range []func(context.Context, *rand.Rand){s.kill, s.stop, s.ask, s.disturb, s.serve} {
		actors.Go(func() { act(ctx, s.random(uint64(i))) })
	}
	actors.Go(func() { s.watchCuts(ctx) })
	actors.Wait()
	s.log("storm over: asking all jobs to end")
	s.proceed()
	jobs.Wait()
}

// random returns the source of one actor: its actions do not depend on the speed of the
// others.
func (s *storm) random(who uint64) *rand.Rand { return rand.New(rand.NewPCG(s.seed, who)) } //nolint:gosec // for tests

func (s *storm) find(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	s.log("FINDING %s", text)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.findings = append(s.findings, text)
}

func (s *storm) count(of map[string]int, what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	of[what]++
}

// proceed continues all stopped processes.
func (s *storm) proceed() {
	for _, p := range s.processes() {
		_ = syscall.Kill(p.pid, syscall.SIGCONT)
	}
}

// killAll kills every process of this storm, for a storm that is cut short.
func (s *storm) killAll() {
	for range 50 {
		all := s.processes()
		for _, p := range all {
			_ = syscall.Kill(p.pid, syscall.SIGKILL)
		}
		if len(all) == 0 {
			break
		}
		pause(context.Background(), 20*time.Millisecond)
	}
	for _, dir := range s.staging() {
		_ = os.RemoveAll(dir)
	}
	if dir := s.runtimeDir(); dir != "" {
		_ = os.RemoveAll(dir)
	}
}

// staging lists this store's files in shared memory.
func (s *storm) staging() []string {
	var id struct{ Store string }
	text, err := os.ReadFile(filepath.Join(s.store, "store.json"))
	if err != nil || json.Unmarshal(text, &id) != nil || len(id.Store) < 12 {
		return nil
	}
	found, _ := filepath.Glob("/dev/shm/ckptstore-memory-*/ckptstore-" + id.Store[len(id.Store)-12:] + "-*")
	return found
}

// print writes the figures, and returns an error if anything was found.
func (s *storm) print() error {
	s.figures.All = time.Since(s.began).Seconds()
	s.figures.Findings = append(s.figures.Findings, s.findings...)
	s.figures.Cuts = max(len(s.cuts)-1, 0)
	s.figures.Backups = len(s.backups)
	enc := json.NewEncoder(os.Stdout)
	enc.SetIndent("", "  ")
	if err := enc.Encode(s.figures); err != nil {
		return err
	}
	n := len(s.figures.Findings) + len(s.figures.Check.Findings)
	for _, more := range []*check.Result{s.figures.Backup, s.figures.Restored} {
		if more != nil {
			n += len(more.Findings)
		}
	}
	if n > 0 {
		return fmt.Errorf("%d findings, with seed %d on %d cores", n, s.seed, runtime.NumCPU())
	}
	return nil
}

// watchCuts counts the names of the live stream.
func (s *storm) watchCuts(ctx context.Context) {
	for pause(ctx, 50*time.Millisecond) {
		streams, _ := filepath.Glob(filepath.Join(s.store, "log", "jetstream", "*", "streams", "CKPT*"))
		s.mu.Lock()
		for _, path := range streams {
			s.cuts[filepath.Base(path)] = true
		}
		s.mu.Unlock()
	}
}

// pause reports whether the time passed before ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// between returns a random time.
func between(random *rand.Rand, least, most time.Duration) time.Duration {
	return least + time.Duration(random.Int64N(int64(most-least)))
}

// oneOf picks by weight, in the order of the names.
func oneOf(random *rand.Rand, weights map[string]int) string {
	names, all := slices.Sorted(maps.Keys(weights)), 0
	for _, w := range weights {
		all += w
	}
	n := random.IntN(all)
	for _, name := range names {
		if n -= weights[name]; n < 0 {
			return name
		}
	}
	return names[0]
}
