package problem

import (
	"errors"
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
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "protocol.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range table {
		k := r.kind
		if row := fmt.Sprintf("\n| %d | ", k.Status()); !strings.Contains(string(page), row) {
			t.Errorf("docs/protocol.md has no row for the status %d of %s", k.Status(), k)
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
