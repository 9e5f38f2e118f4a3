package private

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestPrivate checks paths that this user and another user may have made.
func TestPrivate(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test gives files to another user: run it as root")
	}
	const next = "do this next"
	file := func(path string) error { return os.WriteFile(path, nil, 0o600) }
	folder := func(path string) error { return os.Mkdir(path, 0o700) }
	for what, c := range map[string]struct {
		put                               func(path string) error
		file, secret, onlyName, directory bool
	}{
		"a file":              {file, true, true, true, false},
		"a file to read only": {func(path string) error { return os.WriteFile(path, nil, 0o400) }, true, true, true, false},
		"a directory":         {folder, false, false, false, true},
		"a file with two names": {func(path string) error {
			return errors.Join(file(path), os.Link(path, path+".2"))
		}, true, true, false, false},
		"a file that others read":       {func(path string) error { return errors.Join(file(path), os.Chmod(path, 0o604)) }, false, false, false, false},
		"a file that a group writes":    {func(path string) error { return errors.Join(file(path), os.Chmod(path, 0o620)) }, false, false, false, false},
		"another user's file":           {func(path string) error { return errors.Join(file(path), os.Chown(path, 20002, -1)) }, false, true, false, false},
		"another user's directory":      {func(path string) error { return errors.Join(folder(path), os.Chown(path, 20002, -1)) }, false, false, false, false},
		"a directory that others enter": {func(path string) error { return errors.Join(folder(path), os.Chmod(path, 0o701)) }, false, false, false, false},
		"a link":                        {func(path string) error { return errors.Join(file(path+".2"), os.Symlink(path+".2", path)) }, false, false, false, false},
		"a pipe":                        {func(path string) error { return syscall.Mkfifo(path, 0o600) }, false, false, false, false},
	} {
		path := filepath.Join(t.TempDir(), "path")
		if err := c.put(path); err != nil {
			t.Fatal(err)
		}
		info, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		for as, is := range map[string]struct {
			err  error
			want bool
		}{
			"file":      {File(path, info, next), c.file},
			"secret":    {Secret(path, info, next), c.secret},
			"only name": {OnlyName(path, info, next), c.onlyName},
			"directory": {Directory(path, info, next), c.directory},
		} {
			if (is.err == nil) != is.want {
				t.Errorf("%s as %s: %v", what, as, is.err)
			}
			if err := is.err; err != nil && (!errors.Is(err, ErrNotPrivate) || !errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(), path) || !strings.HasSuffix(err.Error(), next)) {
				t.Errorf("%s as %s: %v", what, as, err)
			}
		}
	}
}

// Kubernetes gives the files of a Secret to root and to a group of the pod.
func TestSecretOfAGroup(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test gives files to another group: run it as root")
	}
	for what, c := range map[string]struct {
		mode        os.FileMode
		owner, user int
		groups      []int
		want        bool
	}{
		"a group of this user reads": {0o440, 0, 65532, []int{1, 65532}, true},
		"with its owner's writes":    {0o640, 0, 65532, []int{65532}, true},
		"another group reads":        {0o440, 0, 65532, []int{1}, false},
		"the group writes":           {0o460, 0, 65532, []int{65532}, false},
		"others read":                {0o444, 0, 65532, []int{65532}, false},
		"another user's":             {0o440, 20002, 65532, []int{65532}, false},
		"this user's":                {0o440, 65532, 65532, []int{65532}, false},
		"root reads":                 {0o440, 0, 0, []int{65532}, false},
		"no group reads":             {0o400, 0, 65532, nil, true},
	} {
		path := filepath.Join(t.TempDir(), "path")
		err := errors.Join(os.WriteFile(path, nil, 0o600), os.Chown(path, c.owner, 65532), os.Chmod(path, c.mode))
		if err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := secret(path, info, c.user, c.groups, "next"); (err == nil) != c.want {
			t.Errorf("%s: %v", what, err)
		}
	}
	dir, err := os.Stat(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := secret("dir", dir, 65532, []int{0}, "next"); err == nil {
		t.Error("a directory is a secret")
	}
}
