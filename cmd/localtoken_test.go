package cmd_test

import (
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/store"
)

// TestLoopbackToken: a store served on loopback is accessible only to its user, without
// any flag.
func TestLoopbackToken(t *testing.T) {
	t.Parallel()
	u := newUsers(t)
	me, other := u.person(alice), u.person(mallory)
	me.exits(0, "trainer", "run", "-q", "--store=ckpts", "--name=a", "--", "true")
	address, stderr, end := me.serve()
	said := regexp.MustCompile(`clients show the token in (\S+);`).FindStringSubmatch(read(t, stderr))
	if said == nil {
		t.Fatalf("serve does not print the path of the token:\n%s", read(t, stderr))
	}
	path, url := said[1], "--store=nats://"+address
	if info, err := os.Lstat(path); err != nil || info.Mode() != 0o600 {
		t.Errorf("the token: %v, %v", info.Mode(), err)
	}
	if strings.Contains(read(t, stderr), strings.TrimSpace(read(t, path))) {
		t.Error("serve prints the token")
	}
	me.exits(0, "ckptstore", "jobs", url)
	me.exits(0, "trainer", "run", "-q", url, "--name=b", "--", "true")

	// Another user has neither the token nor a way to it.
	other.exits(1, "cat", path)
	for name, p := range map[string]person{
		"another user": other, "with its directory": other.with("XDG_RUNTIME_DIR=" + u.place + "/run-20001"),
	} {
		if said := p.exits(12, "ckptstore", "ls", url); !strings.Contains(said, "not allowed") || !strings.Contains(said, store.EnvTokenFile) {
			t.Errorf("%s: %s", name, said)
		}
	}
	other.with(store.EnvToken+"="+strings.Repeat("0", 64)).exits(12, "ckptstore", "ls", url)

	// A process of this user with another runtime directory gets a next step.
	away := me.with("XDG_RUNTIME_DIR="+u.dir("away", alice, 0o700), "TMPDIR="+u.dir("away", alice, 0o700))
	for _, part := range []string{"none was given", u.place + "/away/ckptstore-listeners", "prints the path"} {
		if said := away.exits(12, "ckptstore", "ls", url); !strings.Contains(said, part) {
			t.Errorf("the refusal lacks %q: %s", part, said)
		}
	}
	away.with(store.EnvTokenFile+"="+path).exits(0, "ckptstore", "jobs", url)

	end()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the token outlives the owner: %v", err)
	}
	me.exits(10, "ckptstore", "ls", url)
}
