package reading

import "fmt"

// Busy is what callers have not given back; empty for nothing.
func (s *Server) Busy() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.reads); n > 0 {
		return fmt.Sprintf("%d reads are not given back", n)
	}
	return ""
}
