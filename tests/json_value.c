/* SPDX-License-Identifier: MIT
 *
 * For the scripts: parses standard input as JSON and prints the values named by the arguments, "device.name" or
 * "variants.0.name", a line each. Fails when it is not JSON or a name is not there. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const json_t *find(const json_t *value, const char *path)
{
    char name[64];
    while (value && *path) {
        size_t length = strcspn(path, ".");
        snprintf(name, sizeof name, "%.*s", (int)length, path);
        value = json_is_array(value) ? json_array_get(value, (size_t)atoi(name)) : json_object_get(value, name);
        path += length + (path[length] == '.');
    }
    return value;
}

int main(int argc, char **argv)
{
    json_error_t error;
    json_t *root = json_loadf(stdin, 0, &error);
    if (!root) {
        fprintf(stderr, "json_value: line %d: %s\n", error.line, error.text);
        return 1;
    }
    int status = 0;
    for (int i = 1; i < argc; i++) {
        const json_t *value = find(root, argv[i]);
        if (json_is_string(value))
            puts(json_string_value(value));
        else if (json_is_integer(value))
            printf("%" JSON_INTEGER_FORMAT "\n", json_integer_value(value));
        else if (json_is_real(value))
            printf("%.9g\n", json_real_value(value));
        else if (json_is_boolean(value))
            puts(json_is_true(value) ? "true" : "false");
        else if (json_is_null(value))
            puts("null");
        else {
            fprintf(stderr, "json_value: %s: not there\n", argv[i]);
            status = 1;
        }
    }
    json_decref(root);
    return status;
}
