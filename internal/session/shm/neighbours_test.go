package shm_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/session/shm"
)

// Two users of one machine.
const (
	victim   = 20001
	attacker = 20002
)

// patience bounds the duration of the users' commands.
const patience = 20 * time.Second

// roleEnv makes the test binary play the victim.
const roleEnv = "CKPTSTORE_TEST_ROLE"

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		if err := play(role, os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

const pattern = "ckptstore-*-n[0-9]*"

// play runs the victim: it takes the directory ARGS[1] in ARGS[0] as a trainer
// does and leaves a file there, or frees all directories.
func play(role string, args []string) error {
	if role == "free" {
		freed, bytes, err := shm.Free(args[0], pattern)
		fmt.Println("freed", freed, bytes)
		return err
	}
	d, err := shm.Own(args[0], args[1], slog.New(slog.NewTextHandler(os.Stderr, nil)))
	if err != nil {
		return err
	}
	names, err := d.Names()
	if err != nil {
		return err
	}
	for _, name := range names {
		f, err := d.Open(name, os.O_RDWR)
		if errors.Is(err, shm.ErrNotPrivate) {
			fmt.Println("refused", name)
			continue
		}
		if err != nil {
			return err
		}
		data, err := io.ReadAll(f)
		if err != nil {
			return err
		}
		fmt.Printf("adopted %s %s\n", name, data)
	}
	f, err := d.Create(fmt.Sprint("r0.save.", os.Getpid()))
	if err != nil {
		return err
	}
	if _, err := f.WriteString("secret"); err != nil {
		return err
	}
	fmt.Println("made", f.Name())
	return nil // as if killed: all files stay, and the kernel frees the lock
}

// street is a directory like /dev/shm, with the two users' other files.
type street struct {
	*testing.T
	shared string
	home   string // of the victim, private
	exe    string // which both users can run
	umask  string
	user   uint32 // the user who plays the victim
}

func newStreet(t *testing.T) *street {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test runs processes of other users: run it as root")
	}
	open := folder(t, "/tmp", 0o755)
	s := &street{T: t, shared: folder(t, "/dev/shm", 0o777|os.ModeSticky), home: filepath.Join(open, "home"), exe: filepath.Join(open, "exe"), umask: "022", user: victim}
	own, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// Copied by another process: processes that this one starts meanwhile would
	// hold the file open.
	s.must(exec.CommandContext(t.Context(), "cp", own, s.exe).Run(), os.Chmod(s.exe, 0o755))
	s.folder(s.home, victim, 0o700)
	s.folder(filepath.Join(s.home, "run"), victim, 0o700)
	return s
}

// folder creates a directory that is removed with the test.
func folder(t *testing.T, in string, mode os.FileMode) string {
	t.Helper()
	dir, err := os.MkdirTemp(in, "street") //nolint:usetesting // other users enter it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, mode); err != nil {
		t.Fatal(err)
	}
	return dir
}

func (s *street) must(errs ...error) {
	s.Helper()
	if err := errors.Join(errs...); err != nil {
		s.Fatal(err)
	}
}

func (s *street) folder(path string, user int, mode os.FileMode) {
	s.Helper()
	s.must(os.Mkdir(path, 0o700), os.Chown(path, user, user), os.Chmod(path, mode))
}

func (s *street) file(path string, user int, mode os.FileMode) {
	s.Helper()
	s.must(os.WriteFile(path, []byte(filepath.Base(path)), 0o600), os.Chown(path, user, user), os.Chmod(path, mode))
}

// as runs a shell command as a user.
func (s *street) as(user uint32, script string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(s.Context(), patience)
	defer cancel()
	c := exec.CommandContext(ctx, "/bin/sh", append([]string{"-c", "umask " + s.umask + "; " + script, "sh"}, args...)...)
	c.Dir = "/"
	c.Env = []string{"PATH=/usr/bin:/bin", "TMPDIR=" + s.home, "XDG_RUNTIME_DIR=" + filepath.Join(s.home, "run")}
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	out, err := c.CombinedOutput()
	return string(out), err
}

// attack runs a command of the attacker, which must succeed.
func (s *street) attack(script string, args ...string) {
	s.Helper()
	if out, err := s.as(attacker, script, args...); err != nil {
		s.Fatalf("%s: %v\n%s", script, err, out)
	}
}

// plays runs the victim and returns the words of its output lines by the first
// word.
func (s *street) plays(role string, args ...string) (said map[string][]string, err error) {
	s.Helper()
	out, err := s.as(s.user, "exec env "+roleEnv+"="+role+` "$@"`, append([]string{s.exe}, args...)...)
	said = map[string][]string{}
	for line := range strings.Lines(out) {
		word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		said[word] = append(said[word], rest)
	}
	if err != nil {
		err = fmt.Errorf("%w: %s", err, out)
	}
	return said, err
}

// takes makes the victim take a directory, and returns the file it creates.
func (s *street) takes(name string) (said map[string][]string, made string) {
	s.Helper()
	said, err := s.plays("own", s.shared, name)
	if err != nil || len(said["made"]) != 1 {
		s.Fatal(said, err)
	}
	return said, said["made"][0]
}

// wantHidden checks that the attacker cannot reach a file.
func (s *street) wantHidden(path string) {
	s.Helper()
	for _, script := range []string{`cat "$1"`, `ls "${1%/*}"`, `ls "${1%/*/*}"`, `: > "$1"`, `rm "$1"`, `ln "$1" "${1%/*/*/*}/linked"`, `mv "${1%/*/*}" "${1%/*/*}.mine"`} {
		if out, err := s.as(attacker, script, path); err == nil {
			s.Errorf("another user can do %s with %s: %s", script, path, out)
		}
	}
	if data, err := os.ReadFile(path); err != nil || string(data) != "secret" {
		s.Errorf("%s is %q: %v", path, data, err)
	}
}

func (s *street) parent() string {
	return filepath.Join(s.shared, fmt.Sprint("ckptstore-memory-", s.user))
}

// With any umask, other users cannot enter a user's directory.
func TestParentIsPrivate(t *testing.T) {
	for _, umask := range []string{"022", "002", "077", "000"} {
		s := newStreet(t)
		s.umask = umask
		_, first := s.takes("ckptstore-a-n0")
		if filepath.Dir(filepath.Dir(first)) != s.parent() {
			t.Errorf("%s is not below %s", first, s.parent())
		}
		s.wantHidden(first)
		said, second := s.takes("ckptstore-a-n0")
		if !slices.Equal(said["adopted"], []string{filepath.Base(first) + " secret"}) || filepath.Dir(second) != filepath.Dir(first) {
			t.Errorf("umask %s: the next process has found %q", umask, said)
		}
	}
}

// If another user has taken the parent's name, or others could enter the
// directory, a parent with another name is used. The next process finds the files
// below it.
func TestParentIsTaken(t *testing.T) {
	for what, take := range map[string]func(s *street){
		"a directory": func(s *street) { s.attack(`mkdir -m 0777 "$1"`, s.parent()) },
		"a directory with a planted slot and a lock that is a link": func(s *street) {
			s.attack(`mkdir -m 0777 "$1" "$1/ckptstore-a-n0"; echo poison > "$1/ckptstore-a-n0/r0.save.1"; ln -s "$2/made" "$1/ckptstore-a-n0/lock"; chmod 666 "$1"/*/r0*`, s.parent(), s.home)
		},
		"a private directory of the attacker":         func(s *street) { s.attack(`mkdir -m 0700 "$1"`, s.parent()) },
		"a link to a private directory of the victim": func(s *street) { s.attack(`ln -s "$2/run" "$1"`, s.parent(), s.home) },
		"a link to nothing":                           func(s *street) { s.attack(`ln -s "$2/made" "$1"`, s.parent(), s.home) },
		"a file":                                      func(s *street) { s.attack(`: > "$1"`, s.parent()) },
		"a pipe":                                      func(s *street) { s.attack(`mkfifo -m 0666 "$1"`, s.parent()) },
		"a directory of the victim that all may enter": func(s *street) {
			s.folder(s.parent(), victim, 0o777)
			s.attack(`mkdir -m 0777 "$1/ckptstore-a-n0"; echo poison > "$1/ckptstore-a-n0/r0.save.1"; chmod 666 "$1"/*/r0*`, s.parent())
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := newStreet(t)
			take(s)
			before := tree(t, s.home) + tree(t, s.parent())
			said, first := s.takes("ckptstore-a-n0")
			if len(said["adopted"])+len(said["refused"]) > 0 || !strings.HasPrefix(first, s.parent()+"-") {
				t.Errorf("%q", said)
			}
			s.wantHidden(first)
			said, second := s.takes("ckptstore-a-n0")
			if !slices.Equal(said["adopted"], []string{filepath.Base(first) + " secret"}) || filepath.Dir(second) != filepath.Dir(first) {
				t.Errorf("the next process has found %q, and made %s in addition to %s", said, second, first)
			}
			records, err := filepath.Glob(filepath.Join(s.home, "run", "ckptstore-memory-*"))
			if err != nil || len(records) != 1 {
				t.Fatal(records, err)
			}
			record, err := os.ReadFile(records[0])
			if err != nil || !strings.HasPrefix(first, filepath.Join(s.shared, string(record))+"/") {
				t.Errorf("the record is %q: %v", record, err)
			}
			if after := tree(t, s.home) + tree(t, s.parent()); strings.ReplaceAll(after, fmt.Sprintln(records[0], "-rw-------", victim), "") != before {
				t.Errorf("there was\n%sand now there is\n%s", before, after)
			}
			s.must(os.RemoveAll(s.parent()))
			if _, third := s.takes("ckptstore-a-n0"); filepath.Dir(third) != filepath.Dir(first) {
				t.Errorf("when the name is free again, %s is made in addition to %s", third, first)
			}
		})
	}
}

// Root can enter other users' private directories; their owner reveals them.
func TestParentOfRootIsTaken(t *testing.T) {
	t.Parallel()
	s := newStreet(t)
	s.user = 0
	s.must(os.Chown(filepath.Join(s.home, "run"), 0, 0))
	s.attack(`mkdir -m 0700 "$1" && mkdir -m 0700 "$1/ckptstore-a-n0"`, s.parent())
	said, made := s.takes("ckptstore-a-n0")
	if !strings.HasPrefix(made, s.parent()+"-") {
		t.Errorf("%q", said)
	}
	s.wantHidden(made)
}

// tree lists the files below a path.
func tree(t *testing.T, path string) string {
	t.Helper()
	var out strings.Builder
	err := filepath.WalkDir(path, func(at string, e os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err == nil {
			fmt.Fprintln(&out, at, info.Mode(), info.Sys().(*syscall.Stat_t).Uid)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// A recorded directory is trusted as little as the parent's own name.
func TestRecordIsNotTrusted(t *testing.T) {
	t.Parallel()
	s := newStreet(t)
	s.attack(`mkdir -m 0777 "$1" "$1-mine"`, s.parent())
	_, first := s.takes("ckptstore-a-n0")
	records, err := filepath.Glob(filepath.Join(s.home, "run", "ckptstore-memory-*"))
	if err != nil || len(records) != 1 {
		t.Fatal(records, err)
	}
	elsewhere := filepath.Join(s.home, "elsewhere")
	s.folder(elsewhere, victim, 0o700)
	s.folder(filepath.Join(s.shared, "another"), victim, 0o700)
	for _, named := range []string{filepath.Base(s.parent()) + "-mine", filepath.Base(s.parent()) + "-mine/../../../.." + elsewhere, "another", ""} {
		s.must(os.WriteFile(records[0], []byte(named), 0o600))
		said, made := s.takes("ckptstore-a-n0")
		if len(said["adopted"]) > 0 || !strings.HasPrefix(made, s.parent()+"-") || strings.HasPrefix(made, s.parent()+"-mine/") || filepath.Dir(made) == filepath.Dir(first) {
			t.Errorf("a record of %q: %q", named, said)
		}
		s.wantHidden(made)
	}
	private := filepath.Join(s.home, "private")
	s.file(private, victim, 0o600)
	for what, plant := range map[string]func() error{
		"a link":      func() error { return os.Symlink(filepath.Join(s.home, "made"), records[0]) },
		"a hard link": func() error { return os.Link(private, records[0]) },
		"a pipe":      func() error { return unix.Mkfifo(records[0], 0o600) },
	} {
		s.must(os.Remove(records[0]), plant(), os.Lchown(records[0], victim, victim))
		if said, err := s.plays("own", s.shared, "ckptstore-a-n0"); err == nil || !strings.Contains(err.Error(), shm.ErrNotPrivate.Error()) {
			t.Errorf("a record that is %s: %q, %v", what, said, err)
		}
	}
	if _, err := os.Lstat(filepath.Join(s.home, "made")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the link of a record was followed: %v", err)
	}
}

// Processes that start together under a taken name have one parent: they wait for
// a record that another process is about to write.
func TestProcessesShareTheirRecord(t *testing.T) {
	t.Parallel()
	s := newStreet(t)
	s.attack(`: > "$1"`, s.parent())
	_, first := s.takes("ckptstore-a-n0")
	records, err := filepath.Glob(filepath.Join(s.home, "run", "ckptstore-memory-*"))
	if err != nil || len(records) != 1 {
		t.Fatal(records, err)
	}
	record, err := os.OpenFile(records[0], os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer record.Close()
	parent := filepath.Base(filepath.Dir(filepath.Dir(first)))
	s.must(unix.Flock(int(record.Fd()), unix.LOCK_EX), record.Truncate(0))
	type end struct {
		said map[string][]string
		err  error
	}
	ends := make(chan end, 1)
	go func() {
		said, err := s.plays("own", s.shared, "ckptstore-b-n0")
		ends <- end{said, err}
	}()
	select {
	case e := <-ends:
		t.Fatalf("the record is written under another's lock: %q, %v", e.said, e.err)
	case <-time.After(300 * time.Millisecond):
	}
	_, err = record.WriteAt([]byte(parent), 0)
	s.must(err, record.Close())
	if e := <-ends; e.err != nil || len(e.said["made"]) != 1 || filepath.Dir(filepath.Dir(e.said["made"][0])) != filepath.Join(s.shared, parent) {
		t.Errorf("%q, first %s: %v", e.said, first, e.err)
	}
}

// Files are adopted only if they belong to this user alone.
func TestPlantedFiles(t *testing.T) {
	t.Parallel()
	s := newStreet(t)
	s.folder(s.parent(), victim, 0o700)
	dir := filepath.Join(s.parent(), "ckptstore-a-n0")
	s.folder(dir, victim, 0o700)
	at := func(name string) string { return filepath.Join(dir, name) }
	private := filepath.Join(s.shared, "private")
	s.file(private, victim, 0o600)
	s.file(at("good"), victim, 0o600)
	s.file(at("of the attacker"), attacker, 0o600)
	s.file(at("of the attacker for all"), attacker, 0o666)
	s.file(at("for all"), victim, 0o644)
	s.must(os.Symlink(private, at("link")), os.Lchown(at("link"), victim, victim), os.Link(private, at("hard link")),
		unix.Mkfifo(at("pipe"), 0o600), os.Chown(at("pipe"), victim, victim))
	said, _ := s.takes("ckptstore-a-n0")
	if want := []string{"for all", "hard link", "link", "of the attacker", "of the attacker for all", "pipe"}; !slices.Equal(said["refused"], want) {
		t.Errorf("refused %q, want %q", said["refused"], want)
	}
	if !slices.Equal(said["adopted"], []string{"good good"}) {
		t.Errorf("adopted %q", said["adopted"])
	}
}

// A lock planted by another user is neither followed nor waited for, by owners
// and by those who free. The same holds for a directory that others can enter.
func TestPlantedLocks(t *testing.T) {
	t.Parallel()
	for what, plant := range map[string]func(s *street, dir, lock string){
		"a link":          func(s *street, _, lock string) { s.must(os.Symlink(filepath.Join(s.home, "made"), lock)) },
		"a hard link":     func(s *street, _, lock string) { s.must(os.Link(filepath.Join(s.shared, "private"), lock)) },
		"a pipe":          func(s *street, _, lock string) { s.must(unix.Mkfifo(lock, 0o600), os.Chown(lock, victim, victim)) },
		"of the attacker": func(s *street, _, lock string) { s.file(lock, attacker, 0o666) },
		"in a directory that all may enter": func(s *street, dir, lock string) {
			s.must(os.Chmod(dir, 0o777))
			s.attack(`ln -s "$1" "$2"`, filepath.Join(s.home, "made"), lock)
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := newStreet(t)
			s.file(filepath.Join(s.shared, "private"), victim, 0o600)
			s.must(os.Chmod(s.home, 0o711))
			s.folder(s.parent(), victim, 0o711)
			dir := filepath.Join(s.parent(), "ckptstore-a-n0")
			s.folder(dir, victim, 0o700)
			s.file(filepath.Join(dir, "r0.save.1"), victim, 0o600)
			plant(s, dir, filepath.Join(dir, "lock"))
			s.must(os.Chmod(s.parent(), 0o700))
			before := tree(t, s.home) + tree(t, dir)
			for _, role := range []string{"own", "free"} {
				if said, err := s.plays(role, s.shared, "ckptstore-a-n0"); err == nil || !strings.Contains(err.Error(), shm.ErrNotPrivate.Error()) {
					t.Errorf("%s: %q, %v", role, said, err)
				}
			}
			if after := tree(t, s.home) + tree(t, dir); after != before {
				t.Errorf("there was\n%sand now there is\n%s", before, after)
			}
		})
	}
}

// Directories of former versions, which had no parent, are freed by the same
// rules; those of other users are left alone.
func TestFreeOfFormerVersions(t *testing.T) {
	t.Parallel()
	s := newStreet(t)
	at := func(name string) string { return filepath.Join(s.shared, name) }
	precious := filepath.Join(s.home, "precious")
	s.folder(precious, victim, 0o700)
	s.file(filepath.Join(precious, "thesis"), victim, 0o600)
	s.must(os.Chmod(s.home, 0o711))
	s.folder(at("ckptstore-old-run-n0"), victim, 0o700)
	s.file(at("ckptstore-old-run-n0/r00000.save.1"), victim, 0o600)
	s.attack(`mkdir -m 0777 "$1/ckptstore-theirs-run-n0"; ln -s "$2/made" "$1/ckptstore-theirs-run-n0/lock"; ln -s "$2/precious" "$1/ckptstore-link-run-n0"`, s.shared, s.home)
	s.attack(`mkdir -m 0777 "$1-theirs" "$1-theirs/ckptstore-b-run-n0"; ln -s "$2/precious" "$1-link"`, s.parent(), s.home)
	before := tree(t, s.home)
	said, err := s.plays("free", s.shared)
	if want := fmt.Sprintf("[%s] %d", at("ckptstore-old-run-n0"), len("r00000.save.1")); err != nil || !slices.Equal(said["freed"], []string{want}) {
		t.Errorf("freed %q, want %q: %v", said["freed"], want, err)
	}
	s.folder(at("ckptstore-open-run-n0"), victim, 0o777)
	s.attack(`ln -s "$2/made" "$1/ckptstore-open-run-n0/lock"`, s.shared, s.home)
	if said, err := s.plays("free", s.shared); err == nil || !strings.Contains(err.Error(), "ckptstore-open-run-n0: "+shm.ErrNotPrivate.Error()) {
		t.Errorf("a directory that all may enter: %q, %v", said, err)
	}
	if after := tree(t, s.home); after != before {
		t.Errorf("there was\n%sand now there is\n%s", before, after)
	}
	for _, dir := range []string{"ckptstore-theirs-run-n0", "ckptstore-open-run-n0"} {
		if _, err := os.Lstat(filepath.Join(at(dir), "lock")); err != nil {
			t.Errorf("%s: %v", dir, err)
		}
	}
}
