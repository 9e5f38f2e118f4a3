package problem

import (
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// TestTable checks that each kind has one row, with an HTTP status of a failure,
// exit codes of a failure, and its own title.
func TestTable(t *testing.T) {
	t.Parallel()
	kinds, titles := map[Kind]bool{}, map[string]bool{}
	for _, r := range table {
		k := r.kind
		if k == "" || kinds[k] {
			t.Errorf("kind %q is empty or has two rows", k)
		}
		if k.Title() == "" || titles[k.Title()] {
			t.Errorf("%s: the title %q is empty or another kind's", k, k.Title())
		}
		kinds[k], titles[k.Title()] = true, true
		if k.Status() < 400 || http.StatusText(k.Status()) == "" {
			t.Errorf("%s: status %d", k, k.Status())
		}
		for program, code := range map[string]int{"ckptstore": k.Ckptstore(), "trainer": k.Trainer()} {
			if code <= 0 || code >= 128 {
				t.Errorf("%s: exit code %d of %s", k, code, program)
			}
		}
	}
	for _, k := range []Kind{"", "tea"} {
		if k.Status() != 500 || k.Ckptstore() != 1 || k.Trainer() != 70 || k.Title() != Internal.Title() {
			t.Errorf("kind %q is not internal", k)
		}
	}
}

// TestPage checks that the page of the protocol lists the status of each kind.
func TestPage(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "reference", "protocol.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range table {
		k := r.kind
		if row := fmt.Sprintf("\n| %d | ", k.Status()); !strings.Contains(string(page), row) {
			t.Errorf("docs/reference/protocol.md has no row for the status %d of %s", k.Status(), k)
		}
	}
}

type typed struct {
	kind  Kind
	cause error
}

func (t typed) Error() string     { return "typed" }
func (t typed) ProblemKind() Kind { return t.kind }
func (t typed) Unwrap() error     { return t.cause }

// TestKinds checks that the outermost kind comes first at any depth.
func TestKinds(t *testing.T) {
	t.Parallel()
	sentinel := New(NoStore, "no store")
	plain := errors.New("plain")
	for name, c := range map[string]struct {
		err  error
		want []Kind
	}{
		"nil":               {nil, nil},
		"plain":             {plain, nil},
		"a sentinel":        {sentinel, []Kind{NoStore}},
		"wrapped":           {fmt.Errorf("open: %w: %w", plain, sentinel), []Kind{NoStore}},
		"two":               {fmt.Errorf("%w: %w", New(Locked, "locked"), sentinel), []Kind{Locked, NoStore}},
		"joined":            {errors.Join(plain, nil, sentinel, New(Late, "late")), []Kind{NoStore, Late}},
		"given":             {Wrap(Conflict, fmt.Errorf("x: %w", sentinel)), []Kind{Conflict, NoStore}},
		"with a format":     {Errorf(Gone, "rank %d: %w", 3, sentinel), []Kind{Gone, NoStore}},
		"a type":            {typed{Damage, sentinel}, []Kind{Damage, NoStore}},
		"a type without":    {typed{"", sentinel}, []Kind{NoStore}},
		"below a join":      {fmt.Errorf("x: %w", errors.Join(plain, typed{"", errors.Join(plain, sentinel)})), []Kind{NoStore}},
		"nothing to wrap":   {Wrap(Conflict, nil), nil},
		"an unknown sister": {New("tea", "a teapot"), []Kind{"tea"}},
	} {
		if got := Kinds(c.err); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	if err := Errorf(Gone, "rank %d: %w", 3, sentinel); err.Error() != "rank 3: no store" || !errors.Is(err, sentinel) || !Given(fmt.Errorf("x: %w", err)) {
		t.Errorf("%v has lost its text or its cause", err)
	}
	if Given(sentinel) || Given(typed{kind: Gone}) {
		t.Error("a kind that is declared is not given by a caller")
	}
}

var update = flag.Bool("update", false, "write docs/reference/exit-codes.md")

const exitCodes = `# Exit codes

A command exits with the code of the kind of its error. Servers reply with the HTTP status and
problem details (RFC 9457): ` + "`type` is `tag:ckptstore,2026:problem/KIND`" + `. This page is written by
` + "`go test ./internal/problem -update`" + `.

| kind | meaning | HTTP | ckptstore | trainer |
|---|---|---:|---:|---:|
%s
Codes without a kind:

| code | program | meaning |
|---:|---|---|
| 0 | both | done; of ` + "`trainer run`, also stopped by `ckptstore stop`" + ` |
| 1 | trainer | no restart is left, the last save was lost, a disk is full, a device is not healthy, or this node is excluded from its job |
| 2 | ckptstore | wrong usage |
| 6 | ckptstore | ` + "`verify` found damage; `diff --exit-code`" + ` found differences |
| 6 | trainer | ` + "`doctor`" + ` found problems |
| 64 | trainer | wrong usage or configuration |
| 70 | trainer | internal error |
| 75 | trainer | preempted; the work is in a checkpoint. Over several nodes also: too few nodes, or no contact with the coordinating one; start the job again |
| 130 | ckptstore | interrupted |
| 143 | trainer | preempted; some work is in no checkpoint |
| 128+n | trainer | ended by signal n |
`

// TestExitCodesPage holds docs/reference/exit-codes.md to the table. With -update it
// writes the page.
func TestExitCodesPage(t *testing.T) {
	t.Parallel()
	var rows strings.Builder
	for _, r := range table {
		fmt.Fprintf(&rows, "| `%s` | %s | %d | %d | %d |\n", r.kind, r.title, r.status, r.ckptstore, r.trainer)
	}
	page, path := fmt.Sprintf(exitCodes, rows.String()), filepath.Join("..", "..", "docs", "reference", "exit-codes.md")
	if *update {
		if err := os.WriteFile(path, []byte(page), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != page {
		t.Errorf("%s is stale: run `go test ./internal/problem -update`", path)
	}
}
