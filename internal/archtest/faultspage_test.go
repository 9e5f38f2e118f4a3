package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"regexp"
	"strings"
	"testing"
)

const faultsPage = "docs/explanation/faults.md"

// heldBy matches a package and its tests in the last column of a table: `worker`:
// `TestA`, `TestB`.
var (
	heldBy   = regexp.MustCompile("`([a-z0-9/]+)`: ((?:`Test\\w+`(?:, )?)+)")
	testName = regexp.MustCompile(`Test\w+`)
)

// The page about faults names a test in every line of its tables, and each test exists
// in the package that it names.
func TestFaultsPageNamesTestsThatExist(t *testing.T) {
	tree := os.DirFS(root(t))
	page, err := fs.ReadFile(tree, faultsPage)
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]map[string]bool{}
	lines := 0
	for line := range strings.Lines(string(page)) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "| what happens |") || strings.HasPrefix(line, "|---") {
			continue
		}
		lines++
		cells := strings.Split(strings.Trim(line, "|"), "|")
		if len(cells) != 3 {
			t.Errorf("%d cells, want what happens, what ckptstore does, and what holds it: %s", len(cells), line)
			continue
		}
		groups := heldBy.FindAllStringSubmatch(cells[2], -1)
		named := 0
		for _, g := range groups {
			if have[g[1]] == nil {
				have[g[1]] = testsOf(t, tree, g[1])
			}
			for _, name := range testName.FindAllString(g[2], -1) {
				named++
				if !have[g[1]][name] {
					t.Errorf("package %s has no test %s, which is to hold: %s", g[1], name, cells[0])
				}
			}
		}
		if all := len(testName.FindAllString(line, -1)); named == 0 || named != all {
			t.Errorf("%d tests of packages are named, and %d in all: %s", named, all, line)
		}
	}
	if lines < 20 {
		t.Errorf("%s has %d lines: its tables are not read as they are meant", faultsPage, lines)
	}
}

// testsOf returns the tests in the files of a directory.
func testsOf(t *testing.T, tree fs.FS, dir string) map[string]bool {
	t.Helper()
	names, err := fs.Glob(tree, dir+"/*_test.go")
	if err != nil || len(names) == 0 {
		t.Fatalf("package %s has no tests: %v", dir, err)
	}
	tests := map[string]bool{}
	for _, name := range names {
		text, err := fs.ReadFile(tree, name)
		if err != nil {
			t.Fatal(err)
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Test") {
				tests[f.Name.Name] = true
			}
		}
	}
	return tests
}
