package planner

import (
	_ "log/slog"
	_ "net/http"
	_ "os"
	. "time"
)

var soon = Now()
