package archtest

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

// root returns the directory of the module's go.mod.
func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "go.mod")); err != nil {
		t.Fatalf("find the root of the module: %v", err)
	}
	return dir
}

func check(t *testing.T, tree fs.FS) []string {
	t.Helper()
	findings, err := Check(tree, Repository())
	if err != nil {
		t.Fatal(err)
	}
	lines := make([]string, len(findings))
	for i, finding := range findings {
		lines[i] = finding.String()
	}
	return lines
}

func TestRepositoryObeysItsLaw(t *testing.T) {
	for _, finding := range check(t, os.DirFS(root(t))) {
		t.Error(finding)
	}
}

// A room imports only rooms above it, so there is no cycle of rooms and data
// flows one way down the list.
func TestRoomsAreInOrder(t *testing.T) {
	above := map[string]bool{Any: true}
	for _, r := range Repository().Rooms {
		for _, path := range r.May {
			if !above[path] {
				t.Errorf("room %s may import %s, which does not stand above it in the law", r.Path, path)
			}
		}
		above[r.Path] = true
	}
}

// The law grants no import that no file needs.
func TestRightsAreUsed(t *testing.T) {
	unused, err := Unused(os.DirFS(root(t)), Repository())
	if err != nil {
		t.Fatal(err)
	}
	for _, right := range unused {
		t.Errorf("%s: remove the right from the law", right)
	}
}

func TestModuleIsNamedAsTheLawSays(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root(t), "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := strings.Cut(string(text), "\n")
	if want := "module " + Repository().Module; first != want {
		t.Errorf("go.mod begins with %q, want %q: no import of ours would be recognized", first, want)
	}
}

// The tree in testdata/broken breaks each law at least once; testdata/broken.txt lists
// its findings.
func TestBrokenTree(t *testing.T) {
	want, err := os.ReadFile("testdata/broken.txt")
	if err != nil {
		t.Fatal(err)
	}
	got := strings.Join(check(t, os.DirFS("testdata/broken")), "\n") + "\n"
	if got != string(want) {
		t.Errorf("findings:\n%s\nwant:\n%s", got, want)
	}
}

func TestRepositoryKeepsItsSizes(t *testing.T) {
	findings, err := CheckSizes(os.DirFS(root(t)), Repository())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range findings {
		t.Error(f)
	}
}

func TestSizes(t *testing.T) {
	body := strings.Repeat("// line\n", 5)
	tree := fstest.MapFS{
		"room/a.go":       {Data: []byte("package room\n" + body + "type T struct{}\nfunc (T) M() {}\nfunc (t) M() {}\ntype t int\ntype U int\nconst A, b = 1, 2\n")},
		"room/short.go":   {Data: []byte("package room\n")},
		"room/why.go":     {Data: []byte("package room\n")},
		"internal/x/x.go": {Data: []byte("package x\n" + body + "type A int; type B int\n")},
	}
	law := Law{MaxFiles: 2, MinLines: 6, Public: 2, Short: []Short{{"room/why.go", "a reason"}, {"room/a.go", "none any more"}}}
	findings, err := CheckSizes(tree, law)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range findings {
		got = append(got, f.String())
	}
	want := []string{
		".: 3 exported functions, methods and types outside internal, at most 2 are allowed: unexport what no user needs",
		"room: 3 files, at most 2 are allowed: split the room",
		"room/a.go: the law has a reason for a short file, and it is not short",
		"room/short.go: 1 lines, at least 6 are usual: make it part of the file of its topic, or give a reason in the law",
	}
	if !slices.Equal(got, want) {
		t.Errorf("findings:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestArchtestFailsWhenACoreRoomImportsNATS(t *testing.T) {
	wantFinding(t, os.DirFS("testdata/broken"),
		"projections/nats.go:4: room projections imports github.com/nats-io/nats.go: only events/jetlog, internal/logpeers, internal/natstest may")
}

func TestArchtestFailsWhenACoreRoomReadsTheClock(t *testing.T) {
	wantFinding(t, os.DirFS("testdata/broken"),
		"planner/clock.go:12: core room planner uses time.Now: take the time as an argument")
}

func TestArchtestFailsWhenAnExportedNameHasNoDoc(t *testing.T) {
	wantFinding(t, os.DirFS("testdata/broken"), "tensor/bare.go:6: exported Bare has no doc comment")
}

func wantFinding(t *testing.T, tree fs.FS, want string) {
	t.Helper()
	got := check(t, tree)
	for _, finding := range got {
		if finding == want {
			return
		}
	}
	t.Errorf("no finding %q in:\n%s", want, strings.Join(got, "\n"))
}

// A tree that cannot be judged must not look clean.
func TestRefusesWhatItCannotJudge(t *testing.T) {
	for name, tree := range map[string]fs.FS{
		"no package":    fstest.MapFS{"README.md": {}},
		"only tests":    fstest.MapFS{"tensor/tensor_test.go": {Data: []byte("package tensor")}},
		"syntax error":  fstest.MapFS{"tensor/tensor.go": {Data: []byte("package tensor\nfunc {")}},
		"no such place": os.DirFS("testdata/nowhere"),
	} {
		t.Run(name, func(t *testing.T) {
			if findings, err := Check(tree, Repository()); err == nil {
				t.Errorf("no error, and the findings %v", findings)
			}
		})
	}
}

// A marker inside a string or a page compiles, and would be published.
func TestNoMergeWasLeftUnfinished(t *testing.T) {
	dir := root(t)
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if entry.Name() == ".git" || entry.Name() == "node_modules" {
				return fs.SkipDir
			}
			return nil
		}
		if !entry.Type().IsRegular() {
			return nil
		}
		switch filepath.Ext(path) {
		case ".go", ".md", ".py", ".txtar", ".yml", ".json", "":
		default:
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, marker := range []string{"\n<<<<<<" + "< ", "\n>>>>>>" + "> "} {
			if strings.Contains(string(text), marker) {
				t.Errorf("%s has the conflict marker %q", path, marker[1:])
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
