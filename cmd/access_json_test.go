package cmd_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestAccessJSON issues, lists and revokes tokens with --json: what the commands print is what the
// log has.
func TestAccessJSON(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "store")
	file := "--users=" + filepath.Join(t.TempDir(), "users")
	store := "--store=" + dir
	output(t, 0, "ckptstore", "init", store)
	issued := output(t, 0, "ckptstore", "access", "issue", "ada", "--role", "admin", "--token", "laptop", "--days", "2", "--json", file, store)
	schema(t, "access-issue", issued)
	listed := output(t, 0, "ckptstore", "access", "list", "--json", file)
	schema(t, "access-list", listed)
	var out struct {
		Secret, Hash, Expires string
		Sequence              int
	}
	decode(t, issued, &out)
	server := serveHTTP(t, dir, "127.0.0.1:0", "--http-users", strings.TrimPrefix(file, "--users="))
	whoami := exec.CommandContext(t.Context(), "ckptstore", "access", "whoami", "--http", server.url, "--json")
	whoami.Env = append(os.Environ(), "CKPTSTORE_STORE_TOKEN="+out.Secret)
	who, err := whoami.Output()
	if err != nil || !strings.Contains(string(who), `"principal": "user:ada"`) || !strings.Contains(string(who), out.Hash) || strings.Contains(string(who), out.Secret) {
		t.Errorf("whoami: %s, %v", who, err)
	}
	schema(t, "access-whoami", string(who))
	revoked := output(t, 0, "ckptstore", "access", "revoke", "ada", "--json", file, store)
	schema(t, "access-revoke", revoked)
	var gone struct {
		Hashes   []string
		Sequence int
	}
	decode(t, revoked, &gone)
	if len(gone.Hashes) != 1 || gone.Hashes[0] != out.Hash || out.Sequence == 0 || gone.Sequence <= out.Sequence || !strings.Contains(listed, out.Hash) || len(out.Secret) != 64 {
		t.Errorf("issued %s, revoked %s, listed %s", issued, revoked, listed)
	}
	events := output(t, 0, "ckptstore", "events", "--type", "access.*", "--json", store)
	lines := strings.Split(strings.TrimSpace(events), "\n")
	if len(lines) != 2 || strings.Contains(events, out.Secret) {
		t.Fatalf("the log has %s", events)
	}
	var granted struct {
		Sequence  int
		CkptActor string
		Data      struct{ User, Role, Hash, Token, Expires, By string }
	}
	decode(t, lines[0], &granted)
	if d := granted.Data; granted.Sequence != out.Sequence || !strings.HasPrefix(granted.CkptActor, "uid:") || !strings.HasPrefix(d.By, granted.CkptActor+"@") ||
		d.User != "ada" || d.Role != "admin" || d.Token != "laptop" || d.Hash != out.Hash || d.Expires != out.Expires {
		t.Errorf("the log has %s, issue printed %s", lines[0], issued)
	}
	text, err := os.ReadFile(strings.TrimPrefix(file, "--users="))
	if err != nil || strings.Contains(string(text), out.Secret) {
		t.Errorf("the file has the token: %s, %v", text, err)
	}
}
