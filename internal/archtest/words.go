package archtest

import (
	"fmt"
	"go/scanner"
	"go/token"
	"io/fs"
	"path"
	"regexp"
	"strings"
)

// A Word is a pattern that text of the repository must not contain, and what to write
// instead.
type Word struct {
	Pattern string // a regular expression, matched without regard to case
	Instead string
}

// Words are the expressions that readers of English have to read twice. The check reads
// comments and strings of Go files, and whole files of Python, Markdown, shell and tests
// of commands.
var Words = []Word{
	{`\bwho(m)?ever\b`, "name the actor: the owner, the caller, a process that …"},
	{`\b(no|some|any|every)body\b`, "name the actor: no process, another user, all clients"},
	{`\banew\b`, "again, from scratch, re-…"},
	{`\bbeside\b`, "next to, with, in parallel with, compared with"},
	{`\bsays?\b`, "reports, returns, records, states, prints, specifies"},
	{`\bsaid\b`, "reported, logged, stated, given"},
	{`\baloud\b`, "with a warning"},
	{`\bone that\b`, "name the thing: a checkpoint that …"},
	{`\bthat which\b`, "name the thing"},
	{`\bonce more\b`, "again, retry"},
	{`\ball the same\b`, "anyway, nevertheless"},
	{`\bgo(es)? on\b`, "continue, proceed"},
	{`\bwent on\b`, "continued, proceeded"},
	{`\b(is|are|was|were|been|be) given up\b`, "lost, abandoned, released"},
	{`\blends?\b`, "shares, passes, provides"},
	{`\b(is|are) to be\b`, "must be, is"},
	{`\b(is|are|was|were) told\b`, "receives, is notified, is reported to"},
	{`\b(hearing|parting|enlisted|prey|scribe)s?\b`, "the field's word"},
}

// WordReasons are the files that may contain Words, each with its reason.
var WordReasons = map[string]string{
	"internal/archtest/words.go":      "the list itself",
	"internal/archtest/words_test.go": "tests of the list",
	"CHANGELOG.md":                    "old names of JSON members",
}

// wordList is Words, compiled.
var wordList = func() (list []*regexp.Regexp) {
	for _, w := range Words {
		// Words of a pattern may be on two lines of a comment.
		list = append(list, regexp.MustCompile(`(?i)`+strings.ReplaceAll(w.Pattern, " ", `\s+(?:(?://|#)\s*)?`)))
	}
	return list
}()

// A WordHit is a place whose text contains one of Words.
type WordHit struct {
	Path string
	Line int
	Word string // as it stands there
	Hint string
}

// String formats the hit as FILE:LINE: "WORD": write HINT.
func (h WordHit) String() string {
	return fmt.Sprintf("%s:%d: %q: write %s", h.Path, h.Line, h.Word, h.Hint)
}

// FindWords returns the hits of Words in the files of a tree. It reads no testdata,
// which is fixtures and the programs that made them, except the tests of commands.
func FindWords(tree fs.FS) (hits []WordHit, err error) {
	err = fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name != "." && name != ".ci" && name != ".github" && strings.HasPrefix(d.Name(), ".") || d.Name() == "node_modules" {
				return fs.SkipDir
			}
			return nil
		}
		if !readable(name) || WordReasons[name] != "" {
			return nil
		}
		text, err := fs.ReadFile(tree, name)
		if err != nil {
			return err
		}
		hits = append(hits, wordsOf(name, text)...)
		return nil
	})
	return hits, err
}

// readable reports whether a file is written by hand, for people.
func readable(name string) bool {
	if strings.Contains(name, "testdata/") {
		return strings.Contains(name, "testdata/script") && strings.HasPrefix(path.Ext(name), ".txt")
	}
	switch path.Ext(name) {
	case ".go", ".py", ".md", ".yml", ".c", ".sh", ".d2", ".toml", ".ts", ".svelte", ".mjs":
		return true
	}
	return strings.HasPrefix(name, ".ci/")
}

func wordsOf(name string, text []byte) (hits []WordHit) {
	add := func(line int, part string) {
		for i, pattern := range wordList {
			for _, at := range pattern.FindAllStringIndex(part, -1) {
				before := strings.Count(part[:at[0]], "\n")
				hits = append(hits, WordHit{name, line + before, part[at[0]:at[1]], Words[i].Instead})
			}
		}
	}
	if path.Ext(name) != ".go" {
		add(1, string(text))
		return hits
	}
	files := token.NewFileSet()
	file := files.AddFile(name, -1, len(text))
	var s scanner.Scanner
	s.Init(file, text, nil, scanner.ScanComments)
	// Comments on consecutive lines are one text.
	comment, first, last := "", 0, 0
	flush := func() {
		add(first, comment)
		comment = ""
	}
	for {
		pos, tok, lit := s.Scan()
		line := files.Position(pos).Line
		switch tok {
		case token.EOF:
			flush()
			return hits
		case token.STRING:
			add(line, lit)
		case token.COMMENT:
			if comment == "" || line != last+1 {
				flush()
				comment, first = lit, line
			} else {
				comment += "\n" + lit
			}
			last = line + strings.Count(lit, "\n")
		}
	}
}
