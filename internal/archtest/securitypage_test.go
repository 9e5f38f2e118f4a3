package archtest

import (
	"io/fs"
	"os"
	"path"
	"regexp"
	"strings"
	"testing"
)

const securityPage = "docs/explanation/security.md"

var (
	namedTest  = regexp.MustCompile("`([Tt]est_?\\w+)`")
	pythonTest = regexp.MustCompile(`def (test_\w+)\(`)
)

// Every promise of the page about security names tests, and each of them exists.
func TestSecurityPageNamesTestsThatExist(t *testing.T) {
	tree := os.DirFS(root(t))
	page, err := fs.ReadFile(tree, securityPage)
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]bool{}
	err = fs.WalkDir(tree, ".", func(name string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() {
			return err
		}
		if base := path.Base(name); base != "." && (strings.HasPrefix(base, ".") || base == "testdata") {
			return fs.SkipDir
		}
		if found, err := fs.Glob(tree, path.Join(name, "*_test.go")); err != nil || len(found) > 0 {
			for test := range testsOf(t, tree, name) {
				have[test] = true
			}
			return err
		}
		files, err := fs.Glob(tree, path.Join(name, "test_*.py"))
		for _, file := range files {
			text, err := fs.ReadFile(tree, file)
			if err != nil {
				return err
			}
			for _, def := range pythonTest.FindAllStringSubmatch(string(text), -1) {
				have[def[1]] = true
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "## Promises")
	table, _, _ = strings.Cut(table, "Every refusal")
	rows := 0
	for line := range strings.Lines(table) {
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "|---") || strings.HasPrefix(line, "| a user who") {
			continue
		}
		rows++
		named := namedTest.FindAllStringSubmatch(line, -1)
		if len(named) == 0 {
			t.Errorf("no test is named: %s", line)
		}
		for _, name := range named {
			if !have[name[1]] {
				t.Errorf("there is no test %s: %s", name[1], line)
			}
		}
	}
	if rows < 8 {
		t.Errorf("%s has %d promises: its table is not read as it is meant", securityPage, rows)
	}
}
