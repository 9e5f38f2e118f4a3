package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
)

// TestServersEndHalfOpenConnections checks that every HTTP server limits how long the
// head of a request may take, so that a connection that sends nothing does not hold a
// descriptor forever.
func TestServersEndHalfOpenConnections(t *testing.T) {
	tree := os.DirFS(root(t))
	servers := 0
	eachGoFile(t, tree, nil, func(name string, file *ast.File) {
		ast.Inspect(file, func(n ast.Node) bool {
			made, ok := n.(*ast.CompositeLit)
			if !ok {
				return true
			}
			of, ok := made.Type.(*ast.SelectorExpr)
			if pkg, is := ofPackage(of, ok); !is || pkg != "http" || of.Sel.Name != "Server" {
				return true
			}
			servers++
			if !slices.ContainsFunc(made.Elts, func(e ast.Expr) bool {
				member, ok := e.(*ast.KeyValueExpr)
				if !ok {
					return false
				}
				key, ok := member.Key.(*ast.Ident)
				return ok && key.Name == "ReadHeaderTimeout"
			}) {
				t.Errorf("%s: an http.Server without ReadHeaderTimeout", name)
			}
			return true
		})
	})
	if servers < 3 {
		t.Errorf("%d servers found", servers)
	}
}

func ofPackage(s *ast.SelectorExpr, ok bool) (string, bool) {
	if !ok {
		return "", false
	}
	id, ok := s.X.(*ast.Ident)
	if !ok {
		return "", false
	}
	return id.Name, true
}

// eachGoFile calls do with each Go file of a tree that is neither a test nor test data, and not in one of the
// directories to skip.
func eachGoFile(t *testing.T, tree fs.FS, skip []string, do func(name string, file *ast.File)) {
	t.Helper()
	if err := fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && name != "." && (hidden(path.Base(name)) || d.Name() == "testdata" || slices.Contains(skip, name)):
			return fs.SkipDir
		case d.IsDir(), !strings.HasSuffix(name, ".go"), strings.HasSuffix(name, "_test.go"):
			return nil
		}
		text, err := fs.ReadFile(tree, name)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.SkipObjectResolution)
		if err == nil {
			do(name, file)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}
