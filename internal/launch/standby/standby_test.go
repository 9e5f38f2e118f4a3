package standby_test

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/launch/standby"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Commands whose program can start in a process that waits.
func TestCommand(t *testing.T) {
	t.Parallel()
	for command, want := range map[string]string{
		"python3 train.py --lr 1":              "python3 | - train.py --lr 1",
		"/opt/v/bin/python3.11 -u a.py":        "/opt/v/bin/python3.11 -u | - a.py",
		"python3 -u -m pkg.train x":            "python3 -u | -m pkg.train x",
		"python -X dev -Wignore -W error a.py": "python -X dev -Wignore -W error | - a.py",
		"python3 -OO -Xutf8 -m a":              "python3 -OO -Xutf8 | -m a",
		"python3 -c pass":                      "",
		"python3 -um a":                        "",
		"python3 -i a.py":                      "",
		"python3 -":                            "",
		"python3 directory":                    "",
		"python3 -m":                           "",
		"python3":                              "",
		"./train.py":                           "",
		"sh -c python3":                        "",
		"":                                     "",
	} {
		got, ok := standby.Command(strings.Fields(command), []string{"json", "torch"})
		if ok != (want != "") {
			t.Errorf("%q: %v", command, ok)
			continue
		}
		if !ok {
			continue
		}
		at := slices.Index(got, "-c")
		if seen := fmt.Sprint(strings.Join(got[:at], " "), " | ", strings.Join(got[at+4:], " ")); seen != want || got[at+2] != "3" || got[at+3] != "json,torch" {
			t.Errorf("%q: %s, modules %s; want %s", command, seen, got[at+3], want)
		}
	}
}

// output keeps what a process prints.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// started is a pool for a program.
type started struct {
	t    *testing.T
	pool *standby.Pool
	hunt *process.Hunt
	log  *output
	job  string
}

func start(t *testing.T, size int, modules []string, command ...string) *started {
	t.Helper()
	all, ok := standby.Command(append([]string{"python3"}, command...), modules)
	if !ok {
		t.Fatalf("%q cannot wait", command)
	}
	s := &started{t: t, job: fmt.Sprint(t.Name(), os.Getpid()), log: &output{}}
	s.hunt = process.NewHunt(s.job)
	var err error
	s.pool, err = standby.New(all, append(os.Environ(), client.EnvJob+"="+s.job, "AT_EXEC=yes"), size, s.job, 0, s.hunt, slog.New(slog.NewTextHandler(s.log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.pool.Stop()
		if left, err := process.NewHunt(s.job).Look(); err != nil || len(left) > 0 {
			t.Errorf("processes %v are left, %v", left, err)
		}
	})
	return s
}

// run has a standby run the program, and returns its end and its output.
func (s *started) run(env map[string]string) (process.Exit, string) {
	s.t.Helper()
	var out output
	p := s.pool.Start(7, env, &out, &out)
	if p == nil {
		s.t.Fatalf("no standby; %s", s.log)
	}
	e := p.Wait()
	process.CloseOutput(slog.New(slog.DiscardHandler), p)
	return e, out.String()
}

func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "train.py")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// A script sees what it would see in an interpreter of its own, and the environment of its rank.
func TestScript(t *testing.T) {
	t.Parallel()
	path := script(t, `names = sorted(k for k in globals() if not k.startswith("__"))
import os, sys, pickle, multiprocessing
class Own: pass
def child(q): q.put(os.environ["RANK"])
if __name__ == "__main__":
    print(os.path.basename(__file__), sys.argv[1:], os.environ["RANK"], os.environ["AT_EXEC"], names, __spec__, __package__, __cached__)
    print(sys.path[0] == os.path.dirname(os.path.realpath(__file__)), "json" in sys.modules, sys.modules["__main__"].__dict__ is globals())
    print(type(pickle.loads(pickle.dumps(Own()))) is Own)
    spawn = multiprocessing.get_context("spawn")
    q = spawn.Queue()
    p = spawn.Process(target=child, args=(q,))
    p.start(); print("child", q.get()); p.join()
    sys.exit(3)
`)
	s := start(t, 1, []string{"json"}, path, "--lr", "1")
	e, out := s.run(map[string]string{"RANK": "5", client.EnvSocket: "/none"})
	want := "train.py ['--lr', '1'] 5 yes [] None None None\nTrue True True\nTrue\nchild 5\n"
	if e != (process.Exit{Rank: 7, Code: 3}) || out != want {
		t.Errorf("%v, output\n%s\nwant\n%s", e, out, want)
	}
}

// A script that is named by a relative path knows its absolute one, as in an interpreter of its own, also
// if a module that is imported in advance leaves the directory.
func TestRelativeScript(t *testing.T) {
	t.Parallel()
	path := script(t, "import sys\nprint(__file__, sys.argv[0], (lambda: 0).__code__.co_filename)")
	if err := os.WriteFile(filepath.Join(filepath.Dir(path), "leaves.py"), []byte("import os; os.chdir('/')"), 0o600); err != nil {
		t.Fatal(err)
	}
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	relative, err := filepath.Rel(here, path)
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintln(path, relative, path)
	if e, out := start(t, 1, []string{"leaves"}, relative).run(map[string]string{}); e.Failed() || out != want {
		t.Errorf("%v, output\n%s\nwant\n%s", e, out, want)
	}
}

// A module is run as python -m runs it, from the working directory.
func TestModule(t *testing.T) {
	t.Parallel()
	s := start(t, 1, []string{"json"}, "-m", "json.tool", "--help")
	if e, out := s.run(map[string]string{}); e.Failed() || !strings.Contains(out, "json") {
		t.Errorf("%v: %s", e, out)
	}
}

// Modules that are missing, and what modules print when they are imported, are the rank's output.
func TestPreloadFails(t *testing.T) {
	t.Parallel()
	s := start(t, 1, []string{"no_such_module", "this"}, script(t, "print('runs')"))
	if e, out := s.run(map[string]string{}); e.Failed() || !strings.Contains(out, "module no_such_module is not imported in advance: ModuleNotFoundError") || !strings.Contains(out, "Beautiful is better than ugly") || !strings.Contains(out, "runs\n") {
		t.Errorf("%v: %s", e, out)
	}
}

// The end of an attempt spares the standbys and kills the ranks. A standby that has died is not used.
func TestHunted(t *testing.T) {
	t.Parallel()
	s := start(t, 2, []string{"json"}, script(t, "print('runs', flush=True)\nimport time\ntime.sleep(1000)"))
	var out output
	p := s.pool.Start(0, map[string]string{}, &out, io.Discard)
	await(t, "the rank", func() bool { return strings.Contains(out.String(), "runs") })
	ended := make(chan process.Exit)
	go func() { ended <- p.Wait() }()
	if err := s.hunt.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if e := <-ended; e.Signal != "SIGKILL" {
		t.Errorf("the rank: %v", e)
	}
	process.CloseOutput(slog.New(slog.DiscardHandler), p)
	s.hunt.Forget()
	if left, err := s.hunt.Look(); err != nil || len(left) > 0 {
		t.Errorf("the hunt finds %v, %v", left, err)
	}
	await(t, "the other standby", func() bool { // a process that has just begun shows no environment for a moment
		left, err := process.NewHunt(s.job).Look()
		return err == nil && len(left) == 1
	})
	if err := process.NewHunt(s.job).Kill(t.Context()); err != nil { // as the guard does
		t.Fatal(err)
	}
	if p := s.pool.Start(1, map[string]string{}, &out, &out); p != nil {
		t.Error("a dead standby was used")
	}
}

// await polls until done returns true.
func await(t *testing.T, what string, done func() bool) {
	t.Helper()
	limit := time.After(time.Minute)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("waiting for %s", what)
		}
	}
}
