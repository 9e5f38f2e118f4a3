package cmd_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/store"
)

// users is a directory in which processes of several Unix users run the commands.
type users struct {
	t     *testing.T
	place string
}

// newUsers makes a directory that every user can reach.
func newUsers(t *testing.T) users {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("this test starts processes of other users: run it as root")
	}
	place, err := os.MkdirTemp("/tmp", "ck") //nolint:usetesting // others cannot reach what is in t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(place); err != nil {
			t.Error(err)
		}
	})
	u := users{t, place}
	u.dir("", 0, 0o755)
	u.dir("tmp", 0, 0o777|os.ModeSticky)
	u.dir("bin", 0, 0o755)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, from := range map[string]string{"ckptstore": filepath.Join(bin, "ckptstore"), "trainer": filepath.Join(bin, "trainer"), "forge": self} {
		u.copy(from, filepath.Join(place, "bin", name))
	}
	return u
}

// dir makes a directory of a user, with exactly this mode.
func (u users) dir(name string, uid int, mode os.FileMode) string {
	u.t.Helper()
	path := filepath.Join(u.place, name)
	if err := errors.Join(os.MkdirAll(path, 0o700), os.Chmod(path, mode), os.Chown(path, uid, uid)); err != nil {
		u.t.Fatal(err)
	}
	return path
}

func (u users) copy(from, to string) {
	u.t.Helper()
	if err := copyProgram(from, to); err != nil {
		u.t.Fatal(err)
	}
}

// copyProgram copies a program to where other users can run it. A separate process does
// the copy: a process that another test starts meanwhile would inherit the file open for
// writing, and the program could not be run (ETXTBSY).
func copyProgram(from, to string) error {
	if out, err := exec.Command("cp", from, to).CombinedOutput(); err != nil {
		return fmt.Errorf("cp %s %s: %w\n%s", from, to, err, out)
	}
	return os.Chmod(to, 0o755)
}

// person is one user, with a home and a runtime directory.
type person struct {
	users
	uid  int
	home string
	env  []string // of every command
}

func (u users) person(uid int) person {
	p := person{users: u, uid: uid, home: u.dir(fmt.Sprint(uid), uid, 0o700)}
	p.env = []string{
		"PATH=" + filepath.Join(u.place, "bin") + ":/usr/bin:/bin", "HOME=" + p.home, "GORACE=" + os.Getenv(raceEnv),
		"TMPDIR=" + filepath.Join(u.place, "tmp"), "XDG_RUNTIME_DIR=" + u.dir(fmt.Sprint("run-", uid), uid, 0o700),
	}
	return p
}

// with returns the person with other variables.
func (p person) with(env ...string) person {
	p.env = append(p.env[:len(p.env):len(p.env)], env...)
	return p
}

func (p person) path(name string) string { return filepath.Join(p.home, name) }

func (p person) write(name, text string) {
	p.t.Helper()
	path := p.path(name)
	if err := errors.Join(os.WriteFile(path, []byte(text), 0o600), os.Chown(path, p.uid, p.uid)); err != nil {
		p.t.Fatal(err)
	}
}

// command returns one of the commands, in the home of the person.
func (p person) command(name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(p.t.Context(), filepath.Join(p.place, "bin", name), args...)
	if _, err := os.Stat(cmd.Path); err != nil {
		cmd = exec.CommandContext(p.t.Context(), name, args...)
	}
	cmd.Dir, cmd.Env = p.home, p.env
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(p.uid), Gid: uint32(p.uid)}}
	return cmd
}

// exits runs a command without a terminal, checks its exit code, and returns its output.
func (p person) exits(code int, name string, args ...string) string {
	p.t.Helper()
	cmd := p.command(name, args...)
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		p.t.Fatalf("%s: %v", name, err)
	}
	if got := cmd.ProcessState.ExitCode(); got != code {
		p.t.Fatalf("user %d: %s %q: exit code %d, want %d\n%s", p.uid, name, args, got, code, out)
	}
	return string(out)
}

// serve serves the person's store on loopback and returns its address. end stops the owner
// and waits for it. Otherwise the owner is killed with the test.
func (p person) serve(args ...string) (address, stderr string, end func()) {
	p.t.Helper()
	stderr = filepath.Join(p.place, "serve.err")
	out, err := os.Create(stderr)
	if err != nil {
		p.t.Fatal(err)
	}
	defer out.Close()
	// Without a umask, serve itself must make its secrets private.
	cmd := p.command("sh", append([]string{"-c", `umask 0; exec ckptstore serve --store ckpts --listen 127.0.0.1:0 "$@"`, "sh"}, args...)...)
	cmd.Stderr = out
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	end = func() {
		p.t.Helper()
		if err := errors.Join(cmd.Process.Signal(syscall.SIGINT), cmd.Wait()); err != nil {
			p.t.Errorf("serve: %v\n%s", err, read(p.t, stderr))
		}
	}
	await(p.t, func() bool {
		var card struct{ Address string }
		text, err := os.ReadFile(p.path("ckpts/owner.json"))
		if err == nil {
			decode(p.t, string(text), &card)
		}
		address = card.Address
		return address != "" && strings.Contains(read(p.t, stderr), "serving store")
	})
	return address, stderr, end
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// forgeEnv makes the test binary append a job.started: its value is the URL of the
// log, its arguments are the run and the body.
const forgeEnv = "CKPTSTORE_TEST_FORGE"

func forge(url string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	log, err := jetlog.Connect(ctx, jetlog.Options{URL: url, Token: os.Getenv(store.EnvToken)})
	if err != nil {
		return err
	}
	defer log.Close()
	if _, _, err := log.Open(ctx); err != nil {
		return err
	}
	var body events.JobStarted
	if err := json.Unmarshal([]byte(os.Args[2]), &body); err != nil {
		return err
	}
	fact, err := events.NewFact(store.Stamp("trainer/"+body.Job), events.Scope{Run: os.Args[1], Trial: events.None, Actor: events.Node(0)}, &body)
	if err == nil {
		_, err = log.Append(ctx, fact)
	}
	return err
}

// forges makes the person append a job.started of a run, which needs only access to the
// log.
func (p person) forges(url, token, run string, body events.JobStarted) {
	p.t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		p.t.Fatal(err)
	}
	p.with(forgeEnv+"="+url, store.EnvToken+"="+token).exits(0, "forge", run, string(text))
}

// answers runs a command on a terminal on which a yes was typed ahead, and types an
// answer to its question. It returns the terminal's output.
func (p person) answers(code int, answer, name string, args ...string) string {
	p.t.Helper()
	screen, line, err := terminal()
	if err != nil {
		p.t.Fatal(err)
	}
	defer screen.Close()
	cmd := p.command(name, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = line, line, line
	cmd.SysProcAttr.Setsid, cmd.SysProcAttr.Setctty = true, true
	_, err = screen.WriteString("y\n")
	if err == nil {
		err = cmd.Start()
	}
	if err := errors.Join(err, line.Close()); err != nil {
		p.t.Fatal(err)
	}
	// A command that neither asks nor ends must not block the test.
	defer time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() }).Stop()
	var shown []byte
	for typed := false; ; {
		part := make([]byte, 4096)
		n, err := screen.Read(part)
		shown = append(shown, part[:n]...)
		if !typed && strings.Contains(string(shown), "[y/N] ") {
			typed = true
			if _, err := screen.WriteString(answer + "\n"); err != nil {
				p.t.Fatal(err)
			}
		}
		if err != nil { // the command has closed its end
			if !typed {
				p.t.Errorf("%s %q asks nothing", name, args)
			}
			break
		}
	}
	_ = cmd.Wait() // the exit code is checked instead
	if got := cmd.ProcessState.ExitCode(); got != code {
		p.t.Fatalf("%s %q on a terminal, answered %q: exit code %d, want %d\n%s", name, args, answer, got, code, shown)
	}
	return string(shown)
}

// terminal opens a new pseudo-terminal and returns both of its ends.
func terminal() (screen, line *os.File, err error) {
	screen, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("this test needs a terminal: %w", err)
	}
	err = unix.IoctlSetPointerInt(int(screen.Fd()), unix.TIOCSPTLCK, 0)
	var n uint32
	if err == nil {
		n, err = unix.IoctlGetUint32(int(screen.Fd()), unix.TIOCGPTN)
	}
	if err == nil {
		line, err = os.OpenFile(fmt.Sprint("/dev/pts/", n), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		return nil, nil, errors.Join(err, screen.Close())
	}
	return screen, line, nil
}
