package archtest

import (
	"crypto/sha256"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"net/url"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"unicode"
)

// pages returns the Markdown pages of the repository.
func pages(t *testing.T, tree fs.FS) (names []string) {
	t.Helper()
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md", "examples/*.md", "python/*.md"} {
		found, err := fs.Glob(tree, pattern)
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, found...)
	}
	return names
}

// TestLinksOfPagesResolve checks that each link of a page leads to a file, to a
// heading, or to a declaration, and that each path that a page names is that of a file.
// A link to code has the form [`pkg.Name`](../pkg/file.go), or `Type.Method`: file.go
// declares that name.
func TestLinksOfPagesResolve(t *testing.T) {
	tree := os.DirFS(root(t))
	l := newLinks(tree)
	for _, page := range pages(t, tree) {
		for _, problem := range l.check(page) {
			t.Error(problem)
		}
	}
	if l.headings < 50 || l.symbols < 60 {
		t.Errorf("%d links to headings and %d to declarations: the links are not read as they are meant", l.headings, l.symbols)
	}
}

// TestQuestionsLeadToCode checks that the page for contributors answers at least twelve
// questions, each with a declaration.
func TestQuestionsLeadToCode(t *testing.T) {
	tree := os.DirFS(root(t))
	text, err := fs.ReadFile(tree, "docs/contributing.md")
	if err != nil {
		t.Fatal(err)
	}
	_, part, ok := strings.Cut(string(text), "\n## Where is it?\n")
	if !ok {
		t.Fatal("the page has no questions")
	}
	part, _, _ = strings.Cut(part, "\n## ")
	questions := strings.Split(part, "\n### ")[1:]
	if len(questions) < 12 {
		t.Errorf("%d questions", len(questions))
	}
	for _, q := range questions {
		title, answer, _ := strings.Cut(q, "\n")
		n := 0
		for _, m := range link.FindAllStringSubmatch(answer, -1) {
			if isCode(m[2]) && symbol.MatchString(m[1]) {
				n++
			}
		}
		if n < 2 {
			t.Errorf("%q has %d links to declarations", title, n)
		}
	}
}

// TestBrokenLinksAreFound checks that each sort of broken link is found.
func TestBrokenLinksAreFound(t *testing.T) {
	tree := fstest.MapFS{
		"room/a.go": {Data: []byte("package room\n\ntype T struct{ Field int }\n\ntype I interface{ Ask() }\n\nfunc (t *T) Do() {}\n\nfunc (G[X]) Go() {}\n\ntype G[X any] struct{}\n\nconst C, D = 1, 2\n\nvar V int\n\nfunc F() { local := 1; _ = local }\n")},
		"room/p.py": {Data: []byte("LIMIT: int = 3\n\nclass Wire:\n    def call(self): pass\n\nasync def go(): pass\n\ndef other():\n    def inner(): pass\n")},
		"README.md": {Data: []byte("# One\n\n## Two, `three`\n\n## Two, `three`\n")},
	}
	for text, want := range map[string]string{
		"[a](../README.md), [b](../room), [c](https://example.org/x)":              "",
		"[a](../README.md#two-three), [b](../README.md#two-three-1), [c](#page-x)": "",
		"[`room.T`](../room/a.go) [`T.Do`](../room/a.go) [`room.G.Go`](../room/a.go) [`F`](../room/a.go) [`room.C`](../room/a.go) [`D`](../room/a.go) [`V`](../room/a.go) [`T.Field`](../room/a.go) [`I.Ask`](../room/a.go)": "",
		"[`Wire`](../room/p.py) [`Wire.call`](../room/p.py) [`go`](../room/p.py) [`LIMIT`](../room/p.py)":                                                                                                                    "",
		"[`room/a.go`](../room/a.go) and `room/a.go`":  "",
		"```\n[a](nowhere.md)\n```\n`[a](nowhere.md)`": "",
		"[a](nowhere.md)":               "docs/page.md: nowhere.md: no such file",
		"[wrapped\ntext](nowhere.md)":   "docs/page.md: nowhere.md: no such file",
		"[a](../../README.md)":          "docs/page.md: ../../README.md: outside of the repository",
		"[a](/README.md)":               "docs/page.md: /README.md: outside of the repository",
		"[a](../README.md#four)":        "docs/page.md: ../README.md#four: README.md has no such heading",
		"[a](#four)":                    "docs/page.md: #four: docs/page.md has no such heading",
		"[a](../room/a.go#L3)":          "docs/page.md: ../room/a.go#L3: room/a.go has no headings: name a declaration in the text",
		"[`room.U`](../room/a.go)":      "docs/page.md: ../room/a.go: room/a.go does not declare room.U",
		"[`other.T`](../room/a.go)":     "docs/page.md: ../room/a.go: room/a.go does not declare other.T",
		"[`T.Undo`](../room/a.go)":      "docs/page.md: ../room/a.go: room/a.go does not declare T.Undo",
		"[`room.local`](../room/a.go)":  "docs/page.md: ../room/a.go: room/a.go does not declare room.local",
		"[`wire`](../room/p.py)":        "docs/page.md: ../room/p.py: room/p.py does not declare wire",
		"[`Wire.send`](../room/p.py)":   "docs/page.md: ../room/p.py: room/p.py does not declare Wire.send",
		"[`inner`](../room/p.py)":       "docs/page.md: ../room/p.py: room/p.py does not declare inner",
		"[`other.inner`](../room/p.py)": "docs/page.md: ../room/p.py: room/p.py does not declare other.inner",
		"see `room/b.go`":               "docs/page.md: `room/b.go`: no such file",
		"[a]: ../README.md":             "docs/page.md: [a]: write links in place, so that they are checked",
		"<a href=\"x\">":                "docs/page.md: <a href=: write links in Markdown, so that they are checked",
	} {
		tree["docs/page.md"] = &fstest.MapFile{Data: []byte("# Page x\n\n" + text + "\n")}
		if got := strings.Join(newLinks(tree).check("docs/page.md"), "; "); got != want {
			t.Errorf("%s\n gives %q\nwant %q", text, got, want)
		}
	}
}

var (
	// link is [text](target); its text may be wrapped.
	link      = regexp.MustCompile(`\[([^\[\]]+)\]\(([^()\s]+)\)`)
	reference = regexp.MustCompile(`(?m)^ {0,3}(\[[^\[\]]+\]): `)
	html      = regexp.MustCompile(`<\w+ (?:href|src)=`)
	fence     = regexp.MustCompile("(?ms)^ *```.*?^ *```")
	code      = regexp.MustCompile("`[^`\n]+`")
	heading   = regexp.MustCompile(`(?m)^#{1,6} +(.+?) *$`)
	// symbol is the text of a link to a declaration.
	symbol = regexp.MustCompile("^`([A-Za-z_]\\w*(?:\\.[A-Za-z_]\\w*){0,2})`$")
	// named is a path of a source file as a page names it.
	named = regexp.MustCompile("`([\\w.-]+(?:/[\\w.-]+)+\\.(?:go|py))`")
	// bare is a file's name alone.
	bare = regexp.MustCompile("`(\\w+\\.(?:go|py))`")

	classLine  = regexp.MustCompile(`^class (\w+)`)
	defLine    = regexp.MustCompile(`^( *)(?:async )?def (\w+)`)
	assignLine = regexp.MustCompile(`^(\w+)(?:: [^=]+)? = `)
)

func isCode(target string) bool {
	return strings.HasSuffix(target, ".go") || strings.HasSuffix(target, ".py")
}

// links checks the links of pages in one tree.
type links struct {
	tree              fs.FS
	anchors           map[string][]string        // of a page
	declares          map[string]map[string]bool // by file
	headings, symbols int                        // number of valid links
}

func newLinks(tree fs.FS) *links {
	return &links{tree: tree, anchors: map[string][]string{}, declares: map[string]map[string]bool{}}
}

// check returns the problems of a page's links.
func (l *links) check(page string) (problems []string) {
	add := func(what, format string, args ...any) {
		problems = append(problems, page+": "+what+": "+fmt.Sprintf(format, args...))
	}
	data, err := fs.ReadFile(l.tree, page)
	if err != nil {
		return []string{err.Error()}
	}
	text := fence.ReplaceAllString(string(data), "")
	// A link in a code span is an example.
	text = code.ReplaceAllStringFunc(text, func(span string) string {
		if strings.Contains(span, "](") {
			return ""
		}
		return span
	})
	for _, m := range reference.FindAllStringSubmatch(text, -1) {
		add(m[1], "write links in place, so that they are checked")
	}
	for _, m := range html.FindAllString(text, -1) {
		add(m, "write links in Markdown, so that they are checked")
	}
	for _, m := range link.FindAllStringSubmatch(text, -1) {
		if err := l.follow(page, m[1], m[2]); err != nil {
			add(m[2], "%v", err)
		}
	}
	if page == "docs/moved.md" {
		return problems // it names old paths
	}
	for _, m := range named.FindAllStringSubmatch(text, -1) {
		if !l.exists(m[1]) && !l.exists(path.Join(path.Dir(page), m[1])) {
			add("`"+m[1]+"`", "no such file")
		}
	}
	if page == "ARCHITECTURE.md" {
		for _, m := range bare.FindAllStringSubmatch(text, -1) {
			if !l.somewhere(m[1]) {
				add("`"+m[1]+"`", "no such file")
			}
		}
	}
	return problems
}

// follow resolves one link.
func (l *links) follow(page, text, target string) error {
	u, err := url.Parse(target)
	if err != nil {
		return err
	}
	if u.Scheme != "" {
		if u.Scheme != "https" || u.Host == "" {
			return fmt.Errorf("not a page on the web")
		}
		return nil
	}
	file := page
	if u.Path != "" {
		file = path.Join(path.Dir(page), u.Path)
	}
	if path.IsAbs(u.Path) || !fs.ValidPath(file) {
		return fmt.Errorf("outside of the repository")
	}
	if !l.exists(file) {
		return fmt.Errorf("no such file")
	}
	if u.Fragment != "" {
		if !strings.HasSuffix(file, ".md") {
			return fmt.Errorf("%s has no headings: name a declaration in the text", file)
		}
		if !slices.Contains(l.anchorsOf(file), u.Fragment) {
			return fmt.Errorf("%s has no such heading", file)
		}
		l.headings++
	}
	if name := symbol.FindStringSubmatch(text); isCode(file) && name != nil && name[1] != path.Base(file) {
		if !l.declared(file)[name[1]] {
			return fmt.Errorf("%s does not declare %s", file, name[1])
		}
		l.symbols++
	}
	return nil
}

func (l *links) exists(name string) bool {
	_, err := fs.Stat(l.tree, name)
	return err == nil
}

// somewhere reports whether a file of that name is in the tree.
func (l *links) somewhere(base string) bool {
	found := false
	_ = fs.WalkDir(l.tree, ".", func(name string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir() && name != "." && hidden(e.Name()):
			return fs.SkipDir
		case e.Name() == base:
			found = true
			return fs.SkipAll
		}
		return nil
	})
	return found
}

// anchorsOf returns the fragments by which GitHub finds the headings of a page.
func (l *links) anchorsOf(page string) []string {
	if found, ok := l.anchors[page]; ok {
		return found
	}
	data, _ := fs.ReadFile(l.tree, page)
	found, times := []string{}, map[string]int{}
	for _, m := range heading.FindAllStringSubmatch(fence.ReplaceAllString(string(data), ""), -1) {
		anchor := strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
				return unicode.ToLower(r)
			}
			return -1
		}, link.ReplaceAllString(m[1], "$1"))
		if n := times[anchor]; n > 0 {
			found = append(found, fmt.Sprint(anchor, "-", n))
		} else {
			found = append(found, anchor)
		}
		times[anchor]++
	}
	l.anchors[page] = found
	return found
}

// declared returns the names that a file declares: as a link may have them, with the
// package's name or without.
func (l *links) declared(file string) map[string]bool {
	if l.declares[file] == nil {
		names := map[string]bool{}
		data, err := fs.ReadFile(l.tree, file)
		switch {
		case err != nil:
		case strings.HasSuffix(file, ".py"):
			pythonNames(string(data), names)
		default:
			goNames(file, data, names)
		}
		l.declares[file] = names
	}
	return l.declares[file]
}

func goNames(name string, text []byte, names map[string]bool) {
	file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.SkipObjectResolution)
	if err != nil {
		return
	}
	add := func(name string) {
		names[name] = true
		names[strings.TrimSuffix(file.Name.Name, "_test")+"."+name] = true
	}
	for _, decl := range file.Decls {
		switch decl := decl.(type) {
		case *ast.FuncDecl:
			of, _ := receiver(decl)
			add(of + decl.Name.Name)
		case *ast.GenDecl:
			for _, spec := range decl.Specs {
				switch spec := spec.(type) {
				case *ast.TypeSpec:
					add(spec.Name.Name)
					var members *ast.FieldList
					switch of := spec.Type.(type) {
					case *ast.StructType:
						members = of.Fields
					case *ast.InterfaceType:
						members = of.Methods
					default:
						continue
					}
					for _, m := range members.List {
						for _, name := range m.Names {
							add(spec.Name.Name + "." + name.Name)
						}
					}
				case *ast.ValueSpec:
					for _, name := range spec.Names {
						add(name.Name)
					}
				}
			}
		}
	}
}

// pythonNames adds the names of the module level, and the methods of its classes.
func pythonNames(text string, names map[string]bool) {
	class := ""
	for line := range strings.Lines(text) {
		if strings.TrimSpace(line) == "" || line[0] == '#' || line[0] == ')' || line[0] == '@' {
			continue
		}
		if line[0] != ' ' {
			class = ""
		}
		if m := classLine.FindStringSubmatch(line); m != nil {
			class = m[1]
			names[class] = true
		} else if m := defLine.FindStringSubmatch(line); m != nil {
			switch {
			case m[1] == "":
				names[m[2]] = true
			case m[1] == "    " && class != "":
				names[class+"."+m[2]] = true
			}
		} else if m := assignLine.FindStringSubmatch(line); m != nil {
			names[m[1]] = true
		}
	}
}

// TestPicturesAreDrawnFromTheirText: each picture carries the digest of the text that
// docs/pictures/draw.sh drew it from.
func TestPicturesAreDrawnFromTheirText(t *testing.T) {
	tree := os.DirFS(root(t))
	sources, err := fs.Glob(tree, "docs/pictures/*.d2")
	if err != nil || len(sources) < 2 {
		t.Fatalf("the pictures are %q, %v", sources, err)
	}
	for _, source := range sources {
		text, err := fs.ReadFile(tree, source)
		if err != nil {
			t.Fatal(err)
		}
		picture, err := fs.ReadFile(tree, strings.TrimSuffix(source, ".d2")+".svg")
		if err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("<!-- drawn from %s %x -->", path.Base(source), sha256.Sum256(text)); !strings.Contains(string(picture), want) {
			t.Errorf("the picture of %s is stale: run docs/pictures/draw.sh", source)
		}
	}
}
