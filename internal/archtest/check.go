package archtest

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"go/ast"
	"go/build/constraint"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Finding is one breach of the law. Line is 0 for a finding about a whole file or
// directory.
type Finding struct {
	Path string // slash-separated, relative to the root
	Line int
	Text string
}

// String returns the finding in the form of a compiler's message.
func (f Finding) String() string {
	if f.Line == 0 {
		return f.Path + ": " + f.Text
	}
	return fmt.Sprintf("%s:%d: %s", f.Path, f.Line, f.Text)
}

// source is one parsed file that is not a test.
type source struct {
	path  string
	lines int
	*ast.File
}

// checker collects the findings of one tree.
type checker struct {
	law      Law
	fset     *token.FileSet
	findings []Finding
}

// Check checks every Go package of tree against the law and returns its breaches,
// ordered by path, line and text. It returns an error if the tree cannot be judged: it
// could not be read or parsed, or it holds no package at all.
func Check(tree fs.FS, law Law) ([]Finding, error) {
	c := &checker{law: law, fset: token.NewFileSet()}
	dirs, err := c.parse(tree)
	if err != nil {
		return nil, fmt.Errorf("check architecture: %w", err)
	}
	if len(dirs) == 0 {
		return nil, errors.New("check architecture: no Go file in the tree, is this the root of the module?")
	}
	for dir, files := range dirs {
		c.checkPackage(dir, files)
	}
	return c.ordered(), nil
}

func (c *checker) ordered() []Finding {
	slices.SortFunc(c.findings, func(a, b Finding) int {
		return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Text, b.Text))
	})
	return c.findings
}

// parse returns the files of every package by directory.
func (c *checker) parse(tree fs.FS) (map[string][]source, error) {
	dirs := map[string][]source{}
	err := fs.WalkDir(tree, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			return c.enter(tree, name)
		}
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") || hidden(entry.Name()) {
			return nil
		}
		text, err := fs.ReadFile(tree, name)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(c.fset, name, text, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		if !ignored(file) {
			dir := path.Dir(name)
			dirs[dir] = append(dirs[dir], source{name, bytes.Count(text, []byte("\n")), file})
		}
		return nil
	})
	return dirs, err
}

// enter returns [fs.SkipDir] for a directory that is not part of the tree.
func (c *checker) enter(tree fs.FS, name string) error {
	if name == "." {
		return nil
	}
	if base := path.Base(name); hidden(base) || base == "testdata" || base == "vendor" {
		return fs.SkipDir
	}
	switch _, err := fs.Stat(tree, path.Join(name, "go.mod")); {
	case err == nil:
		return fs.SkipDir
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	return nil
}

func hidden(base string) bool {
	return base[0] == '.' || base[0] == '_' || base == "node_modules"
}

// ignored reports whether the file is excluded from every build.
func ignored(file *ast.File) bool {
	for _, group := range file.Comments {
		if group.Pos() > file.Package {
			return false
		}
		for _, comment := range group.List {
			expr, err := constraint.Parse(comment.Text)
			if tag, ok := expr.(*constraint.TagExpr); err == nil && ok && tag.Tag == "ignore" {
				return true
			}
		}
	}
	return false
}

func (c *checker) add(where string, pos token.Pos, format string, args ...any) {
	line := 0
	if pos.IsValid() {
		line = c.fset.Position(pos).Line
	}
	c.findings = append(c.findings, Finding{where, line, fmt.Sprintf(format, args...)})
}

func (c *checker) checkPackage(dir string, files []source) {
	name := files[0].Name.Name
	for _, drawer := range slices.Compact([]string{path.Base(dir), name}) {
		if slices.Contains(drawers, drawer) {
			c.add(dir, token.NoPos, "package %s: name it after what it holds", drawer)
		}
	}
	c.checkPackageComment(dir, files)
	methods := promised(files)
	for _, file := range files {
		c.checkDocs(file, methods)
		if file.lines > c.law.MaxLines && !ast.IsGenerated(file.File) {
			c.add(file.path, token.NoPos, "%d lines, at most %d are allowed: split the file", file.lines, c.law.MaxLines)
		}
	}
	room := c.law.room(dir)
	if room == nil {
		c.add(dir, token.NoPos, "a room without a law: add it to Repository in internal/archtest")
		return
	}
	for _, file := range files {
		c.checkImports(file, *room)
	}
}

// room returns the room that the directory belongs to, nil if there is none.
func (l Law) room(dir string) *Room {
	for ; dir != "."; dir = path.Dir(dir) {
		if at := slices.IndexFunc(l.Rooms, func(r Room) bool { return r.Path == dir }); at >= 0 {
			return &l.Rooms[at]
		}
	}
	return nil
}

func (c *checker) checkImports(file source, room Room) {
	names := map[string]string{} // of the clocked packages, by their name in this file
	for _, spec := range file.Imports {
		target, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			continue // the parser has refused such a file already
		}
		if text := c.law.breach(room, target); text != "" {
			c.add(file.path, spec.Pos(), "%s", text)
		}
		if _, ok := clocked[target]; ok && room.Core {
			name := target
			if spec.Name != nil {
				name = spec.Name.Name
			}
			if name == "." {
				c.add(file.path, spec.Pos(), "core room %s imports %s into its own names: import it by name, so that its use can be checked", room.Path, target)
			}
			names[name] = target
		}
	}
	ast.Inspect(file.File, func(node ast.Node) bool {
		selector, ok := node.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if of, ok := selector.X.(*ast.Ident); ok {
			if target := names[of.Name]; slices.Contains(clocked[target], selector.Sel.Name) {
				c.add(file.path, selector.Pos(), "core room %s uses %s.%s: take the time as an argument", room.Path, target, selector.Sel.Name)
			}
		}
		return true
	})
}

// breach returns why the room may not import target, "" if it may.
func (l Law) breach(room Room, target string) string {
	if rest, ours := below(target, l.Module); ours {
		to := l.room(path.Join(".", rest))
		switch {
		case to == nil:
			return fmt.Sprintf("room %s imports %s, a room without a law", room.Path, target)
		case to.Path == room.Path:
			return ""
		case to.Closed:
			return fmt.Sprintf("room %s imports %s: nothing may import %s", room.Path, target, to.Path)
		case slices.Contains(room.May, to.Path), slices.Contains(room.May, Any):
			return ""
		case len(room.May) == 0:
			return fmt.Sprintf("room %s imports %s: it may import nothing of ours", room.Path, target)
		}
		return fmt.Sprintf("room %s imports %s: of ours it may import only %s", room.Path, target, strings.Join(room.May, ", "))
	}
	for _, engine := range l.Engines {
		if _, ok := below(target, engine.Prefix); !ok {
			continue
		}
		if !slices.Contains(engine.Owners, room.Path) {
			return fmt.Sprintf("room %s imports %s: only %s may", room.Path, target, strings.Join(engine.Owners, ", "))
		}
		break
	}
	if first, _, _ := strings.Cut(target, "/"); room.NoDeps && strings.Contains(first, ".") {
		return fmt.Sprintf("room %s imports %s: of foreign code it may import only the standard library", room.Path, target)
	}
	if room.Core && slices.ContainsFunc(impure, func(p string) bool { _, ok := below(target, p); return ok }) {
		return fmt.Sprintf("core room %s imports %s: files, network, logging and randomness belong to the edges", room.Path, target)
	}
	return ""
}

// below returns the part of the import path after prefix, in whole elements.
func below(target, prefix string) (string, bool) {
	rest, ok := strings.CutPrefix(target, prefix)
	if !ok || rest != "" && rest[0] != '/' {
		return "", false
	}
	return strings.TrimPrefix(rest, "/"), true
}

// Unused lists the rights of the law that no file of tree uses, as "room A may import
// B", in the order of the law.
func Unused(tree fs.FS, law Law) ([]string, error) {
	c := &checker{law: law, fset: token.NewFileSet()}
	dirs, err := c.parse(tree)
	if err != nil {
		return nil, fmt.Errorf("check architecture: %w", err)
	}
	used := map[[2]string]bool{}
	for dir, files := range dirs {
		from := law.room(dir)
		if from == nil {
			continue
		}
		for _, file := range files {
			for _, spec := range file.Imports {
				target, err := strconv.Unquote(spec.Path.Value)
				if err != nil {
					continue // the parser has refused such a file already
				}
				if rest, ours := below(target, law.Module); ours {
					if to := law.room(path.Join(".", rest)); to != nil {
						used[[2]string{from.Path, to.Path}] = true
					}
				}
			}
		}
	}
	var unused []string
	for _, room := range law.Rooms {
		if slices.Contains(room.May, Any) {
			continue
		}
		for _, to := range room.May {
			if !used[[2]string{room.Path, to}] {
				unused = append(unused, fmt.Sprintf("room %s may import %s", room.Path, to))
			}
		}
	}
	return unused, nil
}
