package store

import "path/filepath"

// Dir is the directory that has the store's files: its location, or that of
// the data behind a URL.
func (s *Store) Dir() string { return filepath.Dir(s.DataDir) }
