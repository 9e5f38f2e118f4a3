package jetlog

import (
	"fmt"
	"net/url"
	"strings"
)

// Redacted is a URL, or several separated by commas, for messages: what stands
// before the host, which may be a password or a token, is replaced. One that
// cannot be parsed is not shown.
func Redacted(urls string) string {
	list := strings.Split(urls, ",")
	for i, text := range list {
		text = strings.TrimSpace(text)
		if !strings.Contains(text, "://") {
			text = "nats://" + text // as the client reads it
		}
		u, err := url.Parse(text)
		switch {
		case err != nil || u.Host == "":
			list[i] = "a URL that cannot be read"
		case u.User != nil:
			u.User = url.User("xxxxx")
			fallthrough
		default:
			list[i] = (&url.URL{Scheme: u.Scheme, User: u.User, Host: u.Host}).String()
		}
	}
	return strings.Join(list, ",")
}

// parse checks URLs. The client's own error would show a password.
func parse(urls string) error {
	for i, text := range strings.Split(urls, ",") {
		if text = strings.TrimSpace(text); !strings.Contains(text, "://") {
			text = "nats://" + text
		}
		if u, err := url.Parse(text); err != nil || u.Host == "" {
			return fmt.Errorf("URL %d of %s is none: want nats://HOST:PORT, characters such as @ and : in a password written as %%40 and %%3A", i+1, Redacted(urls))
		}
	}
	return nil
}
