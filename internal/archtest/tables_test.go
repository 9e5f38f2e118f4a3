package archtest

import (
	"io/fs"
	"os"
	"regexp"
	"strings"
	"testing"
)

// rule is the line between a table's head and its rows.
var rule = regexp.MustCompile(`^\|(\s*:?-+:?\s*\|)+$`)

// TestTablesOfPagesAreWhole checks that each table of a page has a head, so that no
// blank line cuts rows off, and that no first cell repeats in a table.
func TestTablesOfPagesAreWhole(t *testing.T) {
	tree := os.DirFS(root(t))
	names := pages(t, tree)
	for _, name := range names {
		text, err := fs.ReadFile(tree, name)
		if err != nil {
			t.Fatal(err)
		}
		checkTables(t, name, string(text))
	}
	if len(names) < 5 {
		t.Errorf("%d pages found", len(names))
	}
}

func checkTables(t *testing.T, name, text string) {
	t.Helper()
	lines := strings.Split(text, "\n")
	fenced := false
	var rows map[string]bool
	for i, line := range lines {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "```") {
			fenced = !fenced
		}
		if fenced || !strings.HasPrefix(line, "|") {
			rows = nil
			continue
		}
		if rows == nil {
			rows = map[string]bool{}
			if i+1 == len(lines) || !rule.MatchString(strings.TrimSpace(lines[i+1])) {
				t.Errorf("%s:%d: rows of a table without its head: a blank line before them?", name, i+1)
			}
			continue
		}
		first, _, _ := strings.Cut(strings.TrimPrefix(line, "|"), "|")
		if first = strings.TrimSpace(first); rows[first] && strings.HasPrefix(first, "[") {
			t.Errorf("%s:%d: a second row for %s", name, i+1, first)
		}
		rows[first] = true
	}
}
