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
	err := fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && name != "." && (hidden(path.Base(name)) || d.Name() == "testdata"):
			return fs.SkipDir
		case d.IsDir(), !strings.HasSuffix(name, ".go"), strings.HasSuffix(name, "_test.go"):
			return nil
		}
		text, err := fs.ReadFile(tree, name)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
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
		return nil
	})
	if err != nil || servers < 3 {
		t.Errorf("%d servers found, %v", servers, err)
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
